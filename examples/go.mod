module github.com/oncehttp/oncehttp/examples

go 1.26.0

require github.com/oncehttp/oncehttp v0.0.0-00010101000000-000000000000

replace github.com/oncehttp/oncehttp => ../
