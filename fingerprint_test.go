package oncehttp

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf16"

	"github.com/stretchr/testify/require"
)

const jsonType = "application/json"

func ofBody(contentType, body string) [32]byte {
	return fingerprint("POST", "https", "api.pay.example", "/v1/charges?expand=all", contentType, []byte(body))
}

// The values come from a second implementation (Python's hashlib) of the layout
// that fingerprint.go documents. Fingerprints are stored: if this test has to
// change, every record made before becomes one of another request.
func TestFingerprintIsTheSameInEveryVersion(t *testing.T) {
	for _, tt := range []struct{ contentType, body, want string }{
		{"", "", "932816a02605312a1ee1f0a314338564cb76abaf8d3b04992a24e8f49b98fcc2"},
		{"text/plain", `{"b":1,"a":"\u00e9"}`, "7ceac080ba1328567c2e8f015240d29b8e47097b03ba47e9cf87aa11d00b5901"},
		{jsonType, `{"b":1,"a":"\u00e9"}`, "97f083e8c8225d938b12781fe2a96e4066c6ca76826e028b56d8c706571a804d"},
		{jsonType, ` [ {"b" : 1.0 , "a" : "é\n" }, null, [] , {} ] `, "efb15afafb4caeddcd0a43904ea0e9cd0cac8061bd6674cd05c4c6e0d9d17430"},
	} {
		got := ofBody(tt.contentType, tt.body)
		require.Equal(t, tt.want, hex.EncodeToString(got[:]), "%s %s", tt.contentType, tt.body)
	}
}

func TestFingerprintIgnoresHowJSONIsSpelt(t *testing.T) {
	for _, same := range [][]string{
		{`{"amount":1000,"currency":"eur"}`, `{"currency":"eur","amount":1000}`, " {\r\n\t\"amount\" : 1000 ,\n\"currency\" : \"eur\" } \n"},
		{`{"a":{"c":1,"b":[2,{"e":3,"d":4}]}}`, `{"a":{"b":[2,{"d":4,"e":3}],"c":1}}`},
		{`"é"`, `"\u00e9"`, `"\u00E9"`},
		{`"😀"`, `"\ud83d\ude00"`, `"\uD83D\uDE00"`, `"\uD83d\uDe00"`},
		{`"a/b\"\\"`, `"a\/b\u0022\u005c"`, `"\u0061\u002f\u0062\"\\"`},
		{`"\b\f\n\r\t"`, `"\u0008\u000c\u000a\u000D\u0009"`},
		{`{"é":1,"z":2}`, `{"z":2,"\u00e9":1}`},
		{`{"\u0061\"":1,"b":2}`, `{"b":2,"a\u0022":1}`},
		{`{"":0,"a":1,"aa":2,"b":3}`, `{"b":3,"aa":2,"a":1,"":0}`},
		{`[]`, ` [ ] `}, {`{}`, "{\n}"}, {`null`, ` null `}, {`-0.10e+5`, "\t-0.10e+5"}, {`""`, ` ""`},
		{"[1,2]", "[1 ,\n2 ]"},
	} {
		for _, body := range same[1:] {
			require.Equal(t, ofBody(jsonType, same[0]), ofBody(jsonType, body), "%s and %s", same[0], body)
			require.NotEqual(t, ofBody("text/plain", same[0]), ofBody("text/plain", body), "%s and %s as text", same[0], body)
		}
	}
}

func TestFingerprintTellsRequestsApart(t *testing.T) {
	base := ofBody(jsonType, `{"amount":1}`)
	for name, got := range map[string][32]byte{
		"method": fingerprint("PUT", "https", "api.pay.example", "/v1/charges?expand=all", jsonType, []byte(`{"amount":1}`)),
		"scheme": fingerprint("POST", "http", "api.pay.example", "/v1/charges?expand=all", jsonType, []byte(`{"amount":1}`)),
		"host":   fingerprint("POST", "https", "api.pay.example:8443", "/v1/charges?expand=all", jsonType, []byte(`{"amount":1}`)),
		"path":   fingerprint("POST", "https", "api.pay.example", "/v1/charge?expand=all", jsonType, []byte(`{"amount":1}`)),
		"query":  fingerprint("POST", "https", "api.pay.example", "/v1/charges?expand=none", jsonType, []byte(`{"amount":1}`)),
		"body":   ofBody(jsonType, `{"amount":2}`),
		"raw":    ofBody("text/plain", `{"amount":1}`),
		"empty":  ofBody(jsonType, ""),
	} {
		require.NotEqual(t, base, got, name)
	}
	different := []string{
		`{"amount":1.0}`, `{"amount":1e0}`, `{"amount":10}`, `{"amount":"1"}`, `{"amount":[1]}`, `{"amount":{}}`, `{"amount":null}`, `{"Amount":1}`,
		`{"amount":9007199254740993}`, `{"amount":9007199254740992}`, // equal as float64
		`{"amount":0.1}`, `{"amount":0.10}`, `{"amount":0.1000000000000000055511151231257827}`,
		`0`, `-0`, `[1,2]`, `[2,1]`, `[12]`, `[[1],2]`, `[1,[2]]`, `[]`, `[[]]`, `[{}]`, `{}`, `null`, `"null"`, `""`, `[null]`, `[""]`,
		`{"a":"b"}`, `["a","b"]`, `{"a":{"b":1},"c":2}`, `{"a":{"b":1,"c":2}}`, `{"a":"","b":""}`, `{"a":"\",\"b\":\""}`,
		`"é"`, `"e\u0301"`, // the same to the eye only
		`"\\u00e9"`, `"\u0000"`, `"\u0000\u0000"`,
	}
	seen := map[[32]byte]string{base: `{"amount":1}`}
	for _, body := range different {
		_, ok := appendCanonical(nil, []byte(body))
		require.True(t, ok, body)
		sum := ofBody(jsonType, body)
		require.Empty(t, seen[sum], body)
		seen[sum] = body
	}
}

func TestFieldsOfAFingerprintDoNotRunIntoEachOther(t *testing.T) {
	seen := map[[32]byte][]string{}
	const text = "POSThttpsapi/v1{}"
	for i := range len(text) + 1 {
		for j := i; j <= len(text); j++ {
			for k := j; k <= len(text); k++ {
				for _, end := range []int{k, len(text)} {
					fields := []string{text[:i], text[i:j], text[j:k], text[k:end], text[end:]}
					sum := fingerprint(fields[0], fields[1], fields[2], fields[3], "", []byte(fields[4]))
					if other, dup := seen[sum]; dup {
						require.Equal(t, other, fields)
					}
					seen[sum] = fields
				}
			}
		}
	}
	// Nor does a raw body that is spelt like a canonical one pass for it.
	canonical, ok := appendCanonical(nil, []byte(`{"a":1}`))
	require.True(t, ok)
	require.NotEqual(t, ofBody(jsonType, `{"a":1}`), ofBody("", string(canonical)))
	require.NotEqual(t, ofBody(jsonType, `1`), ofBody("", `1`))
}

func TestJSONThatTwoParsersMayReadDifferentlyIsHashedRaw(t *testing.T) {
	nest := func(open, closing string, n int) string { return strings.Repeat(open, n) + strings.Repeat(closing, n) }
	for name, body := range map[string]string{
		"empty":                          ``,
		"white space only":               " \n",
		"no JSON":                        `amount=1&currency=eur`,
		"cut off":                        `{"a":1`,
		"trailing comma":                 `{"a":1,}`,
		"trailing data":                  `{"a":1} x`,
		"two texts":                      "{\"a\":1}\n{\"a\":1}",
		"NUL at the end":                 "{\"a\":1}\x00",
		"byte order mark":                "\uFEFF{\"a\":1}",
		"comment":                        `{"a":1 /* b */}`,
		"NaN":                            `{"a":NaN}`,
		"leading zero":                   `{"a":01}`,
		"plus":                           `{"a":+1}`,
		"single quotes":                  `{'a':1}`,
		"raw newline in a string":        "\"a\nb\"",
		"no-break space outside":         "\u00a0{}",
		"name twice":                     `{"amount":1,"amount":2}`,
		"name twice, equal values":       `{"amount":1,"amount":1}`,
		"name twice, spelt differently":  `{"amount":1,"\u0061mount":2}`,
		"name twice, apart":              `{"b":1,"a":2,"b":3}`,
		"name twice, deep":               `[{"x":{"b":1,"c":[{"b":1,"b":2}]}}]`,
		"empty name twice":               `{"":1,"":2}`,
		"invalid UTF-8":                  "{\"a\":\"\xff\"}",
		"invalid UTF-8 in a name":        "{\"a\xc3\":1}",
		"overlong":                       "\"\xc0\xaf\"",
		"surrogate as UTF-8":             "\"\xed\xa0\x80\"",
		"lone high surrogate":            `"\ud83d"`,
		"high surrogate, then text":      `"\ud83dx"`,
		"high surrogate, then an escape": `"\ud83d\n"`,
		"high surrogate, then a letter":  `"\ud83d\u0061"`,
		"two high surrogates":            `"\ud83d\ud83d"`,
		"lone low surrogate":             `"\ude00"`,
		"pair the wrong way round":       `"\ude00\ud83d"`,
		"lone surrogate in a name":       `{"\ud83d":1}`,
		"U+FFFD":                         "\"\uFFFD\"",
		"U+FFFD, escaped":                `"\ufffd"`,
		"U+FFFD, escaped in capitals":    `"\uFFFD"`,
		"nested arrays":                  nest("[", "]", maxJSONDepth+1),
		"nested objects":                 strings.Repeat(`{"a":`, maxJSONDepth+1) + "1" + strings.Repeat("}", maxJSONDepth+1),
		"nested far":                     nest("[", "]", 100_000),
		"unclosed far":                   strings.Repeat("[", 1_000_000),
	} {
		_, ok := appendCanonical(nil, []byte(body))
		require.False(t, ok, name)
		require.Equal(t, ofBody("text/plain", body), ofBody(jsonType, body), name)
		require.NotEqual(t, ofBody(jsonType, body), ofBody(jsonType, body+" "), name)
	}
	for _, body := range []string{nest("[", "]", maxJSONDepth), nest(`{"a":[`, "]}", maxJSONDepth/2)} {
		_, ok := appendCanonical(nil, []byte(body))
		require.True(t, ok, "%d deep is not too deep", maxJSONDepth)
	}
}

func TestMediaTypesThatAreJSON(t *testing.T) {
	for contentType, want := range map[string]bool{
		"application/json":                  true,
		"Application/JSON":                  true,
		"application/json; charset=utf-8":   true,
		"application/json;charset":          true,
		" \tapplication/json ; q":           true,
		"text/json":                         true,
		"application/problem+json":          true,
		"application/vnd.api+JSON; x=y":     true,
		"":                                  false,
		";":                                 false,
		"+json":                             false,
		"json":                              false,
		"application/jsonl":                 false,
		"application/x-ndjson":              false,
		"application/json-seq":              false,
		"application/json, text/plain":      false,
		"text/plain; x=application/json":    false,
		"text/plain; type=problem+json":     false,
		"application/x-www-form-urlencoded": false,
	} {
		require.Equal(t, want, isJSON(contentType), "%q", contentType)
		require.Equal(t, want, ofBody(contentType, `{"b":1,"a":2}`) == ofBody(contentType, `{"a":2,"b":1}`), "%q", contentType)
	}
}

func TestStreamedBodyHasTheFingerprintOfARawOne(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 10_000)
	for _, body := range []string{"", "a", `{"b":1,"a":2}`, big} {
		want := ofBody("application/octet-stream", body)
		for _, r := range []io.Reader{strings.NewReader(body), iotest.OneByteReader(strings.NewReader(body)), iotest.DataErrReader(strings.NewReader(body))} {
			got, err := fingerprintStream("POST", "https", "api.pay.example", "/v1/charges?expand=all", r)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	}
	got, err := fingerprintStream("POST", "https", "api.pay.example", "/v1/charges?expand=all", nil)
	require.NoError(t, err)
	require.Equal(t, ofBody("", ""), got)

	broken := errors.New("disk on fire")
	got, err = fingerprintStream("POST", "https", "api.pay.example", "/", io.MultiReader(strings.NewReader(big), iotest.ErrReader(broken)))
	require.ErrorIs(t, err, broken)
	require.Zero(t, got, "a part of a body has no fingerprint")
}

func TestFingerprintLeavesTheBodyAsItIs(t *testing.T) {
	body := `{"b":"\u00e9","a":1}`
	buf := []byte(body + "tail")
	fingerprint("POST", "https", "h", "/", jsonType, buf[:len(body)])
	require.Equal(t, body+"tail", string(buf))
}

func TestRandomJSONHasOneFingerprintHoweverItIsWritten(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	changed := 0
	for range 3000 {
		value := randomJSON(rnd, 4)
		a, b := writeJSON(rnd, value), writeJSON(rnd, value)
		require.True(t, json.Valid([]byte(a)), a)
		canonical, ok := appendCanonical(nil, []byte(a))
		require.True(t, ok, a)
		require.LessOrEqual(t, len(canonical), len(a))
		require.Equal(t, ofBody(jsonType, a), ofBody(jsonType, b), "%s\n%s", a, b)

		other := randomJSON(rnd, 4)
		c := writeJSON(rnd, other)
		same := fmt.Sprint(value) == fmt.Sprint(other) // maps print sorted
		if !same {
			changed++
			require.NotEqual(t, ofBody(jsonType, a), ofBody(jsonType, c), "%s\n%s", a, c)
		}
	}
	require.Greater(t, changed, 1000)
}

// randomJSON returns a tree of map, []any, string and json.Number.
func randomJSON(rnd *rand.Rand, depth int) any {
	text := func() string {
		const letters = "ab\"\\/\b\n\x00\x1fé\u2028😀<"
		runes := []rune(letters)
		s := ""
		for range rnd.IntN(4) {
			s += string(runes[rnd.IntN(len(runes))])
		}
		return s
	}
	switch n := rnd.IntN(6); {
	case n < 2 && depth > 0:
		m := map[string]any{}
		for range rnd.IntN(6) {
			m[text()] = randomJSON(rnd, depth-1)
		}
		return m
	case n < 4 && depth > 0:
		a := []any{}
		for range rnd.IntN(4) {
			a = append(a, randomJSON(rnd, depth-1))
		}
		return a
	case n == 4:
		return strconv.Quote(text()) // so that Sprint tells "1" from 1
	}
	return json.Number([]string{"0", "-0", "1", "1.0", "1e0", "9007199254740992", "9007199254740993"}[rnd.IntN(7)])
}

// writeJSON writes a tree with random order, white space and escapes.
func writeJSON(rnd *rand.Rand, value any) string {
	space := func() string { return []string{"", "", " ", "\n\t", "\r\n"}[rnd.IntN(5)] }
	quote := func(s string) string {
		var b strings.Builder
		b.WriteByte('"')
		for _, r := range s {
			short, _ := json.Marshal(string(r))
			switch {
			case rnd.IntN(2) == 0:
				b.Write(short[1 : len(short)-1])
			case rnd.IntN(2) == 0 && r >= ' ' && r != '"' && r != '\\':
				b.WriteRune(r)
			default:
				for _, u := range utf16.Encode([]rune{r}) {
					fmt.Fprintf(&b, []string{`\u%04x`, `\u%04X`}[rnd.IntN(2)], u)
				}
			}
		}
		b.WriteByte('"')
		return b.String()
	}
	var parts []string
	switch v := value.(type) {
	case map[string]any:
		for name, member := range v {
			parts = append(parts, space()+quote(name)+space()+":"+space()+writeJSON(rnd, member)+space())
		}
		rnd.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		return space() + "{" + strings.Join(parts, ",") + "}" + space()
	case []any:
		for _, element := range v {
			parts = append(parts, writeJSON(rnd, element))
		}
		return space() + "[" + strings.Join(parts, ",") + space() + "]" + space()
	case string:
		return space() + quote(v) + space()
	}
	return space() + fmt.Sprint(value) + space()
}

// 256 bytes, as in a charge.
const flatBody = `{"amount":100000,"currency":"eur","customer":"cus_NffrFeUfNV2Hib","payment_method":"pm_1NftVRLkdIwHu7ix","confirm":true,"capture_method":"automatic","description":"order 1042, M\u00fcnchen","statement_descriptor":"SHOP 1042","metadata":"order-1042","on":1}`

func TestFingerprintAllocations(t *testing.T) {
	body := []byte(flatBody)
	_, ok := appendCanonical(nil, body)
	require.True(t, ok)
	require.LessOrEqual(t, testing.AllocsPerRun(1000, func() {
		fingerprint("POST", "https", "api.pay.example", "/v1/charges", jsonType, body)
	}), 3.0)
	require.LessOrEqual(t, testing.AllocsPerRun(1000, func() {
		fingerprint("POST", "https", "api.pay.example", "/v1/charges", "text/plain", body)
	}), 3.0)
}

func BenchmarkFingerprint(b *testing.B) {
	deep := strings.Repeat(`{"b":`, maxJSONDepth-1) + `"` + strings.Repeat("x", 1<<20) + `"` + strings.Repeat(`,"a":0}`, maxJSONDepth-1)
	for _, bb := range []struct{ name, contentType, body string }{
		{"json", jsonType, flatBody},
		{"raw", "text/plain", flatBody},
		{"worst", jsonType, deep}, // 1 MiB, moved once for each of 1,000 objects
	} {
		b.Run(bb.name, func(b *testing.B) {
			body := []byte(bb.body)
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				fingerprint("POST", "https", "api.pay.example", "/v1/charges", bb.contentType, body)
			}
		})
	}
}

func FuzzFingerprint(f *testing.F) {
	for _, s := range []string{`{"b":1,"a":"\u00e9\ud83d\ude00"}`, `{"a":1,"a":2}`, `[1,2.50,-0,1e9,[],{}," ",null,true]`, `"\ud800"`, "\"\xff\"", `{"":{"":{}}}`, flatBody} {
		f.Add([]byte(s), []byte(" "+s+"\n"), uint64(1))
	}
	f.Fuzz(func(t *testing.T, a, b []byte, seed uint64) {
		for _, contentType := range []string{jsonType, string(b)} {
			require.Equal(t, fingerprint("POST", "https", "h", "/", contentType, a), fingerprint("POST", "https", "h", "/", contentType, bytes.Clone(a)))
		}
		decode := func(body []byte) (v any) {
			d := json.NewDecoder(bytes.NewReader(body))
			d.UseNumber()
			require.NoError(t, d.Decode(&v))
			return v
		}
		canonical, ok := appendCanonical(nil, a)
		if !ok {
			require.Equal(t, fingerprint("POST", "https", "h", "/", "", a), fingerprint("POST", "https", "h", "/", jsonType, a))
			return
		}
		require.LessOrEqual(t, len(canonical), len(a))

		// The same value with other white space, and as json.Marshal writes it.
		value := decode(a)
		marshaled, err := json.Marshal(value)
		require.NoError(t, err)
		for _, same := range [][]byte{respace(a, seed), marshaled} {
			got, ok := appendCanonical(nil, same)
			require.True(t, ok, "%q", same)
			require.Equal(t, canonical, got, "%q and %q", a, same)
			require.Equal(t, value, decode(same))
		}
		// And any other body with the same canonical form has the same value.
		if other, ok := appendCanonical(nil, b); ok {
			require.Equal(t, reflect.DeepEqual(value, decode(b)), bytes.Equal(canonical, other), "%q and %q", a, b)
		}
	})
}

// respace puts random white space around the tokens of valid JSON.
func respace(body []byte, seed uint64) []byte {
	rnd := rand.New(rand.NewPCG(seed, 0))
	var compact, out bytes.Buffer
	if err := json.Compact(&compact, body); err != nil {
		panic(err)
	}
	quoted, escaped := false, false
	for _, c := range compact.Bytes() {
		edge := !quoted && strings.IndexByte("{}[],:", c) >= 0
		if edge {
			out.WriteString([]string{"", " ", "\t\r\n"}[rnd.IntN(3)])
		}
		out.WriteByte(c)
		if edge {
			out.WriteString([]string{"", " ", "\n"}[rnd.IntN(3)])
		}
		if c == '"' && !escaped {
			quoted = !quoted
		}
		escaped = quoted && c == '\\' && !escaped
	}
	return out.Bytes()
}
