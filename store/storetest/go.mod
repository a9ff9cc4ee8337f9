module github.com/oncehttp/oncehttp/store/storetest

go 1.26.0

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/oncehttp/oncehttp v0.0.0-00010101000000-000000000000
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
	pgregory.net/rapid v1.3.0
)

require (
	github.com/google/uuid v1.6.0 // indirect
	github.com/sony/gobreaker/v2 v2.4.0 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/time v0.16.0 // indirect
)

replace github.com/oncehttp/oncehttp => ../../
