package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

func TestOneUpstreamThatFailsLeavesTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		apis := &apis{sends: make(map[string]int)}
		var out bytes.Buffer
		lines := watch(t.Context(), &out, apis, newTransport(faulty.Handler(apis)))

		require.Len(t, lines, ticks)
		require.Len(t, strings.Split(strings.TrimSpace(out.String()), "\n"), ticks+2)
		var fxSends, opened, mailed int
		for i, l := range lines {
			require.Equal(t, 3, l.by[cards].ok, "tick %d: cards are not disturbed", i)
			require.Equal(t, 3, l.by[cards].sends)
			require.Equal(t, 10.0, l.by[cards].Tokens)
			require.Equal(t, "closed", l.by[cards].Breaker)

			require.Zero(t, l.by[mail].failed, "tick %d: more mail waits, it does not fail", i)
			require.LessOrEqual(t, l.by[mail].sends, 5, "tick %d: two at once and ten a second", i)
			require.Equal(t, "closed", l.by[mail].Breaker)
			mailed += l.by[mail].ok

			if l.fxDown {
				require.Zero(t, l.by[fx].ok)
				fxSends += l.by[fx].sends
			}
			if l.by[fx].Breaker == "open" {
				opened++
			}
		}
		require.Equal(t, mails, mailed)
		require.Positive(t, opened)
		require.Less(t, fxSends, 30, "36 calls and their retries, most of them stopped by the breaker")

		last := lines[ticks-1].by[fx]
		require.Equal(t, "closed", last.Breaker)
		require.Equal(t, 6, last.ok)
		require.Greater(t, last.Tokens, 1.0, "successes fill the budget again")
	})
}
