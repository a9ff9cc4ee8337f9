package faulty_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

func draw(s faulty.Script, n int) (all []faulty.Fault) {
	for i := range n {
		all = append(all, s(i+1, nil))
	}
	return all
}

func TestRandomIsReplayed(t *testing.T) {
	script := func(seed uint64) faulty.Script {
		return faulty.Random(seed, 0.5, faulty.LoseResponse(), faulty.Status(503))
	}
	first := draw(script(7), 1000)
	require.Equal(t, first, draw(script(7), 1000))
	require.NotEqual(t, first, draw(script(8), 1000))

	again := script(7)
	for n := 1000; n > 0; n-- { // in any order
		require.Equal(t, first[n-1], again(n, nil))
	}
}

func TestRandomKeepsItsOdds(t *testing.T) {
	count := make(map[faulty.Fault]int)
	for _, f := range draw(faulty.Random(1, 0.3, faulty.LoseResponse(), faulty.LoseResponse(), faulty.Status(503)), 10_000) {
		count[f]++
	}
	require.InDelta(t, 7000, count[faulty.Pass()], 200)
	require.InDelta(t, 2000, count[faulty.LoseResponse()], 200)
	require.InDelta(t, 1000, count[faulty.Status(503)], 200)

	for _, never := range []faulty.Script{faulty.Random(1, 0, faulty.Drain()), faulty.Random(1, 1), faulty.InOrder()} {
		require.Equal(t, make([]faulty.Fault, 100), draw(never, 100))
	}
	require.NotContains(t, draw(faulty.Random(1, 1, faulty.Drain()), 100), faulty.Pass())
}

func TestInOrderThenPass(t *testing.T) {
	require.Equal(t, []faulty.Fault{faulty.Drain(), faulty.Pass(), faulty.DropConn(), faulty.Pass(), faulty.Pass()},
		draw(faulty.InOrder(faulty.Drain(), faulty.Pass(), faulty.DropConn()), 5))
}

func TestFaultsAreComparableAndSayWhatTheyAre(t *testing.T) {
	require.True(t, faulty.Fault{} == faulty.Pass())
	require.True(t, faulty.LoseResponse() == faulty.DropRequest().AfterHandler())
	again := faulty.Status(429, "Retry-After", "1")
	require.True(t, faulty.Status(429, "Retry-After", "1") == again)
	require.False(t, faulty.Status(429, "Retry-After", "1") == faulty.Status(429, "Retry-After", "2"))
	require.True(t, faulty.Drain().AfterHandler() == faulty.Drain())
	require.True(t, faulty.Stall(-1) == faulty.Stall(0))

	for want, f := range map[string]faulty.Fault{
		"pass":                           faulty.Pass(),
		"lose request":                   faulty.LoseRequest(),
		"drop request":                   faulty.DropRequest(),
		"lose response":                  faulty.LoseResponse(),
		"status 502 after handler":       faulty.Status(502).AfterHandler(),
		"stall 1m0s":                     faulty.Stall(time.Minute),
		"stall after handler":            faulty.Stall(0).AfterHandler(),
		"truncate at 3":                  faulty.Truncate(3),
		"truncate chunked at 3":          faulty.TruncateChunked(3),
		"RST_STREAM CANCEL":              faulty.RSTStream(faulty.Cancel),
		"RST_STREAM 0xd":                 faulty.RSTStream(0xd),
		"GOAWAY":                         faulty.GoAway(),
		"reset after body after handler": faulty.ResetAfterBody().AfterHandler(),
		"close stale":                    faulty.CloseStale(),
		"drop conn":                      faulty.DropConn(),
		"drain":                          faulty.Drain(),
		"RST_STREAM REFUSED_STREAM":      faulty.RSTStream(faulty.RefusedStream),
		"reset before body":              faulty.ResetBeforeBody(),
		"RST_STREAM ENHANCE_YOUR_CALM":   faulty.RSTStream(faulty.EnhanceYourCalm),
		"RST_STREAM PROTOCOL_ERROR":      faulty.RSTStream(faulty.ProtocolError),
		"RST_STREAM INTERNAL_ERROR":      faulty.RSTStream(faulty.InternalError),
		"close stale after handler":      faulty.CloseStale().AfterHandler(),
		"GOAWAY after handler":           faulty.GoAway().AfterHandler(),
		"status 429":                     faulty.Status(429, "Retry-After", "1"),
	} {
		require.Equal(t, want, f.String())
	}
}

func TestStatusRefusesAMalformedHeader(t *testing.T) {
	for _, header := range [][]string{{"Retry-After"}, {"A", "b\r\nC: d"}, {"A:", "b"}} {
		require.Panics(t, func() { faulty.Status(503, header...) })
	}
}
