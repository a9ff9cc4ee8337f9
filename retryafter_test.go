package oncehttp

import (
	"math"
	"math/big"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// retryNow is 0.4 s past a full second, so that rounding shows.
var retryNow = time.Date(2026, 12, 1, 12, 0, 0, 400_000_000, time.UTC)

func TestRetryAfterGrammar(t *testing.T) {
	const (
		absent = -1
		ms     = time.Millisecond
		forAll = math.MaxInt64
	)
	huge := strings.Repeat("9", 1000)
	for _, tt := range []struct {
		name, value string
		want        time.Duration
	}{
		{"Retry-After", "0", 0},
		{"Retry-After", "7", 7 * time.Second},
		{"Retry-After", "00007", 7 * time.Second},
		{"Retry-After", strings.Repeat("0", 1000) + "7", 7 * time.Second},
		{"Retry-After", " \t7 \t", 7 * time.Second},
		{"Retry-After", "3600", time.Hour},
		{"Retry-After", "0.0", 0},
		{"Retry-After", "1.5", 1500 * ms},
		{"Retry-After", "1.05", 1050 * ms},
		{"Retry-After", "0.503", 503 * ms},
		{"Retry-After", "292.052427053", 292_052_427_053},
		{"Retry-After", "0.000000001", 1},
		{"Retry-After", "0.0000000001", 1}, // up, never down
		{"Retry-After", "0.0000000010", 1},
		{"Retry-After", "0.9999999999", time.Second},
		{"Retry-After", "2." + huge, 3 * time.Second},
		{"Retry-After", "2." + strings.Repeat("0", 1000), 2 * time.Second},
		{"Retry-After", "9223372036", 9223372036 * time.Second},
		{"Retry-After", "9223372036.854775807", forAll},
		{"Retry-After", "9223372036.9", forAll},
		{"Retry-After", "9223372037", forAll},
		{"Retry-After", "9223372036854775807", forAll},
		{"Retry-After", "18446744073709551616", forAll}, // 2^64
		{"Retry-After", huge, forAll},
		{"Retry-After", huge + "." + huge, forAll},

		{"Retry-After-Ms", "0", 0},
		{"Retry-After-Ms", "250", 250 * ms},
		{"Retry-After-Ms", "0250", 250 * ms},
		{"Retry-After-Ms", " 250\t", 250 * ms},
		{"Retry-After-Ms", "0.5", 500 * time.Microsecond},
		{"Retry-After-Ms", "0.000001", 1},
		{"Retry-After-Ms", "0.0000001", 1},
		{"Retry-After-Ms", "1234.5678", 1_234_567_800},
		{"Retry-After-Ms", "9223372036854", 9223372036854 * ms},
		{"Retry-After-Ms", "9223372036855", forAll},
		{"Retry-After-Ms", huge, forAll},
		{"Retry-After-Ms", "-1", absent},
		{"Retry-After-Ms", "1e3", absent},
		{"Retry-After-Ms", "Tue, 01 Dec 2026 12:01:00 GMT", absent},
		{"X-Ms-Retry-After-Ms", "250", 250 * ms},
		{"X-Ms-Retry-After-Ms", "0.5", 500 * time.Microsecond},
		{"X-Ms-Retry-After-Ms", "soon", absent},

		// As Base implementations other than net/http may spell them.
		{"retry-after", "7", 7 * time.Second},
		{"RETRY-AFTER", "7", 7 * time.Second},
		{"retry-after-ms", "7", 7 * ms},
		{"x-ms-retry-after-ms", "7", 7 * ms},
		{"X-MS-Retry-After-MS", "7", 7 * ms},
		{"X-Retry-After", "7", absent},
		{"Retry-Afte", "7", absent},
		{"Ratelimit-Reset", "7", absent},

		// 60 s after 12:00:00, until that second is over: 60.6 s from now.
		{"Retry-After", "Tue, 01 Dec 2026 12:01:00 GMT", 60_600 * ms},
		{"Retry-After", "Tuesday, 01-Dec-26 12:01:00 GMT", 60_600 * ms},
		{"Retry-After", "Tue Dec  1 12:01:00 2026", 60_600 * ms},
		{"Retry-After", " Tue, 01 Dec 2026 12:01:00 GMT ", 60_600 * ms},
		{"Retry-After", "Tue, 01 Dec 2026 12:00:01 GMT", 1600 * ms},
		{"Retry-After", "Tue, 01 Dec 2026 12:00:00 GMT", absent},
		{"Retry-After", "Tue, 01 Dec 2026 11:00:00 GMT", absent},
		{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT", forAll},
		{"Retry-After", "Mon, 01 Jan 0001 00:00:00 GMT", absent},
		{"Retry-After", "Tue, 01 Dec 2026 12:01:00 UTC", absent},
		{"Retry-After", "Tue, 01 Dec 2026 12:01:00 +0000", absent},
		{"Retry-After", "Tue, 31 Feb 2026 12:01:00 GMT", absent},
		{"Retry-After", "Tue, 01 Dec 2026 24:01:00 GMT", absent},
		{"Retry-After", "2026-12-01T12:01:00Z", absent},
		{"Retry-After", "Tue, 01 Dec 2026 12:01:00 GMT, 7", absent},

		{"Retry-After", "", absent},
		{"Retry-After", " ", absent},
		{"Retry-After", "-3", absent},
		{"Retry-After", "-0", absent},
		{"Retry-After", "+3", absent},
		{"Retry-After", "7,9", absent},
		{"Retry-After", "7, 9", absent},
		{"Retry-After", "7;9", absent},
		{"Retry-After", "7 9", absent},
		{"Retry-After", "7s", absent},
		{"Retry-After", "soon", absent},
		{"Retry-After", "NaN", absent},
		{"Retry-After", "Inf", absent},
		{"Retry-After", "Infinity", absent},
		{"Retry-After", "1e3", absent},
		{"Retry-After", "0x10", absent},
		{"Retry-After", "1_000", absent},
		{"Retry-After", ".5", absent},
		{"Retry-After", "5.", absent},
		{"Retry-After", ".", absent},
		{"Retry-After", "1.2.3", absent},
		{"Retry-After", "1.-5", absent},
		{"Retry-After", "1,5", absent},
		{"Retry-After", "\n7", absent}, // only spaces and tabs are trimmed
		{"Retry-After", "\u00a07", absent},
		{"Retry-After", "٧", absent}, // a digit, but not DIGIT
		{"Retry-After", "7\x00", absent},
		{"Retry-After", "\xff", absent},
	} {
		wait, ok := retryAfter(http.Header{tt.name: {tt.value}}, retryNow)
		if tt.want == absent {
			require.False(t, ok, "%s: %.80q", tt.name, tt.value)
			require.Zero(t, wait)
			continue
		}
		require.True(t, ok, "%s: %.80q", tt.name, tt.value)
		require.Equal(t, tt.want, wait, "%s: %.80q", tt.name, tt.value)
	}
}

func TestOfSeveralRetryAftersTheLargestValidOneCounts(t *testing.T) {
	for _, tt := range []struct {
		header http.Header
		want   time.Duration
	}{
		{http.Header{"Retry-After": {"2", "9", "4"}}, 9 * time.Second},
		{http.Header{"Retry-After": {"soon", "2", "-9"}}, 2 * time.Second},
		{http.Header{"Retry-After": {"0", "-9"}}, 0},
		{http.Header{"Retry-After": {"1"}, "Retry-After-Ms": {"1500"}}, 1500 * time.Millisecond},
		{http.Header{"Retry-After": {"2"}, "Retry-After-Ms": {"1500"}}, 2 * time.Second},
		{http.Header{"X-Ms-Retry-After-Ms": {"20"}, "Retry-After-Ms": {"10"}}, 20 * time.Millisecond},
		{http.Header{"Retry-After": {"2"}, "retry-after": {"3"}}, 3 * time.Second},
		{http.Header{"Retry-After": {"2", "Tue, 01 Dec 2026 12:00:09 GMT"}, "Date": {"Tue, 01 Dec 2026 12:00:00 GMT"}}, 9 * time.Second},
		{http.Header{"Retry-After": {"2", "Tue, 01 Dec 2026 11:00:00 GMT"}}, 2 * time.Second},
	} {
		wait, ok := retryAfter(tt.header, retryNow)
		require.True(t, ok, "%v", tt.header)
		require.Equal(t, tt.want, wait, "%v", tt.header)
	}
}

func TestRetryAfterDateIsMeasuredFromTheAnswersOwnDate(t *testing.T) {
	const in30s = "Tue, 01 Dec 2026 12:00:30 GMT"
	for name, tt := range map[string]struct {
		date []string
		want time.Duration // -1: absent
	}{
		"the same clock":            {[]string{"Tue, 01 Dec 2026 12:00:00 GMT"}, 30 * time.Second},
		"server an hour behind us":  {[]string{"Tue, 01 Dec 2026 11:00:30 GMT"}, time.Hour},
		"server ahead of us":        {[]string{"Tue, 01 Dec 2026 12:00:29 GMT"}, time.Second},
		"RFC 850":                   {[]string{"Tuesday, 01-Dec-26 12:00:00 GMT"}, 30 * time.Second},
		"asctime":                   {[]string{"Tue Dec  1 12:00:00 2026"}, 30 * time.Second},
		"spaces":                    {[]string{"\tTue, 01 Dec 2026 12:00:00 GMT "}, 30 * time.Second},
		"equal is absent":           {[]string{in30s}, -1},
		"past is absent":            {[]string{"Tue, 01 Dec 2026 12:00:31 GMT"}, -1},
		"none: until second's end":  {nil, 30_600 * time.Millisecond},
		"empty: as none":            {[]string{""}, 30_600 * time.Millisecond},
		"malformed: as none":        {[]string{"today"}, 30_600 * time.Millisecond},
		"malformed and valid":       {[]string{"today", "Tue, 01 Dec 2026 12:00:00 GMT"}, 30 * time.Second},
		"two: the longer wait wins": {[]string{"Tue, 01 Dec 2026 12:00:20 GMT", "Tue, 01 Dec 2026 12:00:10 GMT", "Tue, 01 Dec 2026 12:00:20 GMT"}, 20 * time.Second},
	} {
		for _, dateName := range []string{"Date", "date"} {
			wait, ok := retryAfter(http.Header{"Retry-After": {in30s}, dateName: tt.date}, retryNow)
			require.Equal(t, tt.want != -1, ok, name)
			require.Equal(t, max(tt.want, 0), wait, name)
		}
	}
	// Seconds count from now, whatever Date says.
	wait, ok := retryAfter(http.Header{"Retry-After": {"30"}, "Date": {"Tue, 01 Dec 2026 11:00:00 GMT"}}, retryNow)
	require.True(t, ok)
	require.Equal(t, 30*time.Second, wait)
}

// The server asks for whole seconds from an instant that it truncates in both
// dates; the answer takes a while to arrive. Whatever the fractions are, we
// come back no earlier than it meant, and at most a second after.
func TestTruncatedDatesNeverMakeUsEarly(t *testing.T) {
	for sent := time.Duration(0); sent < time.Second; sent += 50 * time.Millisecond {
		for transit := time.Duration(0); transit < 2*time.Second; transit += 50 * time.Millisecond {
			answered := retryNow.Truncate(time.Second).Add(sent)
			meant := answered.Add(30 * time.Second)
			received := answered.Add(transit)
			h := http.Header{"Retry-After": {meant.Format(http.TimeFormat)}}
			wait, ok := retryAfter(h, received)
			require.True(t, ok)
			require.True(t, received.Add(wait).After(meant), "sent at %v, in transit for %v", sent, transit)
			require.False(t, received.Add(wait).After(meant.Add(time.Second)))

			h.Set("Date", answered.Format(http.TimeFormat))
			wait, ok = retryAfter(h, received)
			require.True(t, ok)
			require.Equal(t, 30*time.Second, wait)
		}
	}
}

func TestRFC850YearIsAtMostFiftyYearsAhead(t *testing.T) {
	at := func(year int) time.Time { return time.Date(year, 12, 1, 12, 0, 0, 0, time.UTC) }
	for _, tt := range []struct {
		now  int
		yy   string
		year int
	}{
		{2026, "26", 2026}, {2026, "00", 2000}, {2026, "68", 2068},
		{2026, "69", 2069}, {2026, "76", 2076}, // 19xx to http.ParseTime
		{2026, "77", 1977}, {2026, "99", 1999},
		{2010, "60", 2060}, {2010, "61", 1961},
		{2080, "30", 2130}, {2080, "31", 2031},
	} {
		date, ok := parseDate("Tuesday, 01-Dec-"+tt.yy+" 12:00:00 GMT", at(tt.now))
		require.True(t, ok)
		require.Equal(t, at(tt.year), date.UTC(), "%s in %d", tt.yy, tt.now)
	}
}

func TestRFC850DateInAnotherZoneIsNotTakenForGMT(t *testing.T) {
	for _, zone := range []string{"PST", "EST", "CET", "UTC", "GMT+3", "GMT-8", ""} {
		_, ok := retryAfter(http.Header{"Retry-After": {"Tuesday, 01-Dec-26 12:01:00 " + zone}}, retryNow)
		require.False(t, ok, zone)
	}
}

// A12: the number of seconds overflowed, and "leave me alone" became 21
// requests in 400 ms.
func TestRetryAfterThatOverflowsIsNotAnImmediateBurst(t *testing.T) {
	for _, v := range []string{"9223372037", "9223372036854775807", "9223372036854775808", "99999999999999999999999"} {
		for _, name := range []string{"Retry-After", "Retry-After-Ms"} {
			wait, ok := retryAfter(http.Header{name: {v}}, retryNow)
			require.True(t, ok)
			require.GreaterOrEqual(t, wait, 9223372037*time.Millisecond, "%s: %s", name, v)
		}
	}
}

// A13: what was not an integer was parsed as a calendar year.
func TestSignedOrFractionalRetryAfterIsNotACalendarYear(t *testing.T) {
	for _, v := range []string{"-3", "+3", "", " ", "7,9", "soon"} {
		wait, ok := retryAfter(http.Header{"Retry-After": {v}}, retryNow)
		require.False(t, ok, "%q", v)
		require.Zero(t, wait)
	}
	for v, want := range map[string]time.Duration{"1.5": 1500 * time.Millisecond, "0": 0, "00007": 7 * time.Second, "7 ": 7 * time.Second} {
		wait, ok := retryAfter(http.Header{"Retry-After": {v}}, retryNow)
		require.True(t, ok, "%q", v)
		require.Equal(t, want, wait)
	}
}

// A39, A70: fractions, from three to nine decimals, raised an exception or
// were not seen at all.
func TestRetryAfterFractionsOfRealServicesAreObeyed(t *testing.T) {
	for v, want := range map[string]time.Duration{"0.503": 503 * time.Millisecond, "292.052427053": 292_052_427_053} {
		wait, ok := retryAfter(http.Header{"Retry-After": {v}}, retryNow)
		require.True(t, ok)
		require.Equal(t, want, wait)
	}
}

// A40, A71: the pure part of the two. What was asked for is reported as it is,
// so that the loop can refuse it; capping it here would retry too early.
func TestLongRetryAfterIsNotCapped(t *testing.T) {
	for v, want := range map[string]time.Duration{"600": 10 * time.Minute, "3600": time.Hour} {
		wait, ok := retryAfter(http.Header{"Retry-After": {v}}, retryNow)
		require.True(t, ok)
		require.Equal(t, want, wait)
	}
}

// A41: a date in the past gave a negative sleep, which threw; zero would send
// all clients back at the same moment.
func TestRetryAfterInThePastIsNoHint(t *testing.T) {
	now := retryNow.Truncate(time.Second)
	for _, ahead := range []time.Duration{-time.Hour, -time.Second, 0} {
		h := http.Header{"Retry-After": {now.Add(ahead).Format(http.TimeFormat)}}
		wait, ok := retryAfter(h, now)
		require.False(t, ok, "%v", ahead)
		require.Zero(t, wait)
		h.Set("Date", now.Format(http.TimeFormat))
		_, ok = retryAfter(h, now)
		require.False(t, ok, "%v, with Date", ahead)
	}
	// Our clock is 90 s ahead of the server's.
	wait, ok := retryAfter(http.Header{
		"Date":        {now.Add(-90 * time.Second).Format(http.TimeFormat)},
		"Retry-After": {now.Add(-60 * time.Second).Format(http.TimeFormat)},
	}, now)
	require.True(t, ok)
	require.Equal(t, 30*time.Second, wait)
}

func TestNoRetryAfterCostsNoAllocation(t *testing.T) {
	h := http.Header{
		"Content-Type": {"application/json"}, "Content-Length": {"17"}, "Cache-Control": {"no-store"}, "Retry-Count": {"1"},
		"Date": {"Tue, 01 Dec 2026 12:00:00 GMT"}, "Request-Id": {"req_1"}, "Server": {"nginx"}, "Vary": {"Origin"},
	}
	found := false
	allocs := testing.AllocsPerRun(1000, func() {
		_, ok := retryAfter(h, retryNow)
		found = found || ok
	})
	require.False(t, found)
	require.Zero(t, allocs)

	h["Retry-After"] = []string{"7"}
	require.Zero(t, testing.AllocsPerRun(1000, func() { _, found = retryAfter(h, retryNow) }))
	require.True(t, found)

	_, ok := retryAfter(nil, retryNow)
	require.False(t, ok)
}

func FuzzRetryAfter(f *testing.F) {
	for _, v := range []string{"7", "1.5", "9223372037", "-3", "7,9", "0.0000000001", "Tue, 01 Dec 2026 12:01:00 GMT", "Tuesday, 01-Dec-26 12:01:00 GMT", "Tue Dec  1 12:01:00 2026", "Tuesday, 29-Feb-00 12:01:00 GMT"} {
		f.Add(v, "250", "Tue, 01 Dec 2026 12:00:00 GMT", retryNow.Unix())
	}
	f.Fuzz(func(t *testing.T, value, ms, date string, unix int64) {
		now := time.Unix(unix, 0)
		for _, h := range []http.Header{
			{"Retry-After": {value}},
			{"Retry-After": {value}, "Date": {date}},
			{"Retry-After-Ms": {ms}},
			{"Retry-After": {value}, "X-Ms-Retry-After-Ms": {ms}, "Date": {date}},
		} {
			wait, ok := retryAfter(h, now)
			require.GreaterOrEqual(t, wait, time.Duration(0))
			require.True(t, ok || wait == 0)
		}
		for unit, v := range map[time.Duration]string{time.Second: value, time.Millisecond: ms} {
			name := "Retry-After"
			if unit == time.Millisecond {
				name = "Retry-After-Ms"
			}
			wait, ok := retryAfter(http.Header{name: {v}}, now)
			if strings.Trim(v, "0123456789") == "" && v != "" {
				require.True(t, ok)
			}
			// An independent reading: exact, and rounded up once.
			asked, valid := new(big.Rat).SetString(strings.Trim(v, " \t"))
			if !ok || !valid || strings.Trim(v, " \t0123456789.") != "" {
				continue
			}
			got := new(big.Rat).SetInt64(int64(wait))
			asked.Mul(asked, new(big.Rat).SetInt64(int64(unit)))
			require.True(t, wait == math.MaxInt64 || got.Cmp(asked) >= 0, "%q: %v is early", v, wait)
			require.Negative(t, got.Sub(got, asked).Cmp(big.NewRat(1, 1)), "%q: %v is over a nanosecond late", v, wait)
		}
	})
}
