package oncehttp

import (
	"math"
	"net/http"
	"strings"
	"time"
)

// retryAfter returns how long, from now on, an answer asks its client to wait.
// ok is false if it does not say, or says nothing that makes sense; a malformed
// value is an absent one, since it must never turn a retryable answer into a
// failure.
//
// It reads Retry-After (RFC 9110 §10.2.3: seconds, or one of the three HTTP
// dates), and retry-after-ms and x-ms-retry-after-ms, which OpenAI, Azure and
// others send for milliseconds. Both units may have a fraction, as some rate
// limiters write it. Of several values the largest valid one counts: each of
// them was asked for, and we are never early.
//
// "0" is a valid value: the upstream says that no wait is needed. A date that
// is not in the future is an absent one: it is left over, or a sign of clocks
// that differ, and obeying it would send every client back at once.
//
// The names are matched in any letter case, because a Base that is not
// net/http may not have made them canonical. That walks the header, without
// allocating; only answers that may be retried get here.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	for name, values := range h {
		unit := time.Duration(0)
		switch {
		case strings.EqualFold(name, "Retry-After"):
			unit = time.Second
		case strings.EqualFold(name, "Retry-After-Ms"), strings.EqualFold(name, "X-Ms-Retry-After-Ms"):
			unit = time.Millisecond
		default:
			continue
		}
		for _, v := range values {
			v = strings.Trim(v, " \t") // OWS of RFC 9110 §5.6.3, nothing else
			d, valid := parseDecimal(v, unit)
			if !valid && unit == time.Second {
				d, valid = untilDate(v, h, now)
			}
			if valid {
				wait, ok = max(wait, d), true
			}
		}
	}
	return wait, ok
}

// parseDecimal reads digits with an optional fraction, in units of a second or
// a millisecond, rounded up to the next nanosecond. It saturates: a huge number
// means "leave me alone", and must not overflow into a negative wait, which is
// none. It counts in integers, since a float would round some values down.
func parseDecimal(s string, unit time.Duration) (time.Duration, bool) {
	whole, fraction, hasFraction := strings.Cut(s, ".")
	if !isDigits(whole) || hasFraction && !isDigits(fraction) {
		return 0, false
	}
	d := time.Duration(0)
	for i := range len(whole) {
		digit := time.Duration(whole[i] - '0')
		if d > (math.MaxInt64/unit-digit)/10 {
			return math.MaxInt64, true
		}
		d = d*10 + digit
	}
	d *= unit // at most MaxInt64, by the check above
	part := time.Duration(0)
	for i := range len(fraction) {
		unit /= 10
		if unit == 0 { // finer than a nanosecond
			if strings.Trim(fraction[i:], "0") != "" {
				part++
			}
			break
		}
		part += time.Duration(fraction[i]-'0') * unit
	}
	if d > math.MaxInt64-part {
		return math.MaxInt64, true
	}
	return d + part, true
}

func isDigits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

// untilDate returns how long to wait for an HTTP date. Dates count whole
// seconds, and how that is made up for depends on what they are measured from.
//
// The answer's own Date, if it has one: the server's clock measures both ends,
// so that ours may be wrong by any amount. The server wrote Date at the instant
// t or truncated it, so Date <= t; we start to wait after t, and end at or
// after t + (date-Date) >= date. A server that adds whole seconds to one reading
// of its clock and truncates both gets back exactly those seconds.
//
// Else our clock, which is not truncated: what the server meant may be up to a
// second later than what it wrote, so we wait until that second is over.
// Without the addition, 30 s asked for at 12:00:00.9 and read at 12:00:01.0
// would be a wait of 29.
func untilDate(s string, h http.Header, now time.Time) (time.Duration, bool) {
	date, valid := parseDate(s, now)
	if !valid {
		return 0, false
	}
	if from, valid := answerDate(h, now); valid {
		return max(date.Sub(from), 0), date.After(from)
	}
	if !date.After(now) {
		return 0, false
	}
	return date.Add(time.Second).Sub(now), true // Sub saturates
}

// answerDate returns the answer's Date header; of several, which is an error
// of the server's, the earliest, from which the wait is the longest.
func answerDate(h http.Header, now time.Time) (date time.Time, ok bool) {
	for name, values := range h {
		if !strings.EqualFold(name, "Date") {
			continue
		}
		for _, v := range values {
			d, valid := parseDate(strings.Trim(v, " \t"), now)
			if valid && (!ok || d.Before(date)) {
				date, ok = d, true
			}
		}
	}
	return date, ok
}

// parseDate reads the three forms of RFC 9110 §5.6.7. http.ParseTime is wrong
// about two things in the RFC 850 form, the only one with a '-': it takes any
// zone name, most of them as UTC, which is hours early for "PST"; and it takes
// the two-digit years from 69 on as 19xx for ever, where §5.6.7 wants the year
// that is at most 50 years ahead.
func parseDate(s string, now time.Time) (time.Time, bool) {
	date, err := http.ParseTime(s)
	if err != nil {
		return time.Time{}, false
	}
	if !strings.Contains(s, "-") {
		return date, true
	}
	if !strings.HasSuffix(s, " GMT") {
		return time.Time{}, false
	}
	latest := now.UTC().AddDate(50, 0, 0)
	centuries := latest.Year()/100 - date.Year()/100
	date = date.AddDate(100*centuries, 0, 0)
	if date.After(latest) {
		date = date.AddDate(-100, 0, 0)
	}
	return date, true
}
