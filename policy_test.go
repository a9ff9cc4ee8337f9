package oncehttp

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
)

// field returns the named field of a policy, "Budget.Ratio" too.
func field(p *Policy, name string) reflect.Value {
	v := reflect.ValueOf(p).Elem()
	for part := range strings.SplitSeq(name, ".") {
		v = v.FieldByName(part)
	}
	return v
}

func setNumber(v reflect.Value, n float64) {
	if v.Kind() == reflect.Float64 {
		v.SetFloat(n)
	} else {
		v.SetInt(int64(n))
	}
}

func TestEveryNegativeIsAnErrorOfValidateUnlessItIsOffWhereOffIsNamed(t *testing.T) {
	takesOff := map[string]bool{
		"MaxAttempts": true, "AttemptTimeout": true, "MaxElapsed": true, "MaxRetryAfter": true, "Budget.Ratio": true,
		"Breaker.FailureRatio": true, "KeyWindow": true, "MaxBodyBytes": true, "MaxResponseBytes": true,
		"BaseDelay": false, "MaxDelay": false, "Budget.Burst": false, "Budget.MinPerSecond": false, "Breaker.MinCalls": false,
		"Breaker.Window": false, "Breaker.OpenFor": false, "Breaker.Probes": false, "RateLimit": false, "RateBurst": false,
		"MaxInFlight": false, "KeyMaxLen": false,
	}
	// A number that is added later has to be decided here.
	var numbers func(v reflect.Type, prefix string)
	numbers = func(v reflect.Type, prefix string) {
		for f := range v.Fields() {
			switch f.Type.Kind() {
			case reflect.Int, reflect.Int64, reflect.Float64:
				require.Contains(t, takesOff, prefix+f.Name)
			case reflect.Struct:
				numbers(f.Type, prefix+f.Name+".")
			}
		}
	}
	numbers(reflect.TypeFor[Policy](), "")

	for name, off := range takesOff {
		for _, n := range []float64{-1, -2, -1e9} {
			var p Policy
			setNumber(field(&p, name), n)
			for where, tr := range map[string]*Transport{
				"Policy":              {Policy: p},
				`Upstreams["a.test"]`: {Upstreams: map[string]Policy{"a.test": p}},
			} {
				err := tr.Validate()
				if off && n == Off {
					require.NoError(t, err, name)
					continue
				}
				require.ErrorContains(t, err, where)
				require.ErrorContains(t, err, name)
				require.ErrorContains(t, err, "negative")
			}
		}
	}
}

func TestValuesThatCannotWorkAreErrorsOfValidate(t *testing.T) {
	for want, p := range map[string]Policy{
		"Budget.Ratio is not a number":         {Budget: Budget{Ratio: math.NaN()}},
		"Budget.MinPerSecond is not a number":  {Budget: Budget{MinPerSecond: math.Inf(1)}},
		"Breaker.FailureRatio is not a number": {Breaker: Breaker{FailureRatio: math.NaN()}},
		"RateLimit is not a number":            {RateLimit: rate.Limit(math.NaN())},
		"Budget.Ratio is above 1":              {Budget: Budget{Ratio: 1.1}},
		"Breaker.FailureRatio is above 1":      {Breaker: Breaker{FailureRatio: 1.01}},
		"Breaker.MinCalls":                     {Breaker: Breaker{MinCalls: math.MaxUint32 + 1}},
		"Breaker.Probes":                       {Breaker: Breaker{Probes: math.MaxUint32 + 1}},
		"KeyMaxLen is above 255":               {KeyMaxLen: 256},
		"Keys value is not a KeyMode":          {Keys: 3},
		"Keys value is KeysOff, but":           {Keys: KeysOff, KeyHeader: "X-Key"},
		"KeysOff":                              {Keys: KeysOff, KeyWindow: time.Hour},
		"is KeysOff":                           {Keys: KeysOff, NewKey: DerivedKey},
		"value is KeysOff":                     {Keys: KeysOff, KeyMaxLen: 36},
		"KeyHeader is not a header name":       {KeyHeader: "X Key"},
		"the KeyHeader is not":                 {KeyHeader: "X-Key:"},
		"DeadlineHeader is not a header name":  {DeadlineHeader: "X-Deadline\r\nX-Evil"},
		"BaseDelay is above MaxDelay":          {BaseDelay: 2 * time.Second, MaxDelay: time.Second},
		"AttemptTimeout is above MaxElapsed":   {AttemptTimeout: 2 * time.Minute, MaxElapsed: time.Minute},
		"RateBurst is set without RateLimit":   {RateBurst: 5},
	} {
		require.ErrorContains(t, (&Transport{Policy: p}).Validate(), want)
		require.ErrorContains(t, (&Transport{Upstreams: map[string]Policy{"a.test": p}}).Validate(), want)
	}
}

func TestContradictionsOverTwoLevelsAreFound(t *testing.T) {
	tr := &Transport{Policy: Policy{MaxDelay: time.Second}, Upstreams: map[string]Policy{"a.test": {BaseDelay: time.Minute}}}
	require.ErrorContains(t, tr.Validate(), `Upstreams["a.test"]: the BaseDelay is above MaxDelay`)
	tr = &Transport{Upstreams: map[string]Policy{"A.test": {}, "a.test.": {}}}
	require.ErrorContains(t, tr.Validate(), "are one")
	tr = &Transport{Upstreams: map[string]Policy{"": {}}}
	require.ErrorContains(t, tr.Validate(), "empty")
}

// cases.md A87: a maximum of one nanosecond panicked in the random function.
func TestTheSmallestAndOddestDelaysNeitherPanicNorFail(t *testing.T) {
	for _, base := range []time.Duration{0, 1, 2, -1, 3} {
		for _, most := range []time.Duration{0, 1, 2, -1} {
			synctest.Test(t, func(t *testing.T) {
				tr := &Transport{Base: answers(503), Policy: Policy{BaseDelay: base, MaxDelay: most}}
				valid := base >= 0 && most >= 0 && (base == 0 || most == 0 || base <= most)
				require.Equal(t, valid, tr.Validate() == nil, "%d %d", base, most)
				r := do(contract(t, tr), fetch(t, t.Context()))
				if !valid {
					require.ErrorIs(t, r.err, ErrInvalid)
					require.Equal(t, NotSent, r.report.Outcome)
					return
				}
				require.NoError(t, r.err)
				require.Equal(t, 3, r.report.Attempts)
			})
		}
	}
}

// cases.md A81: a test-only switch left the sleep at zero in production.
func TestZeroMeansSafeDefaultsAndNotNoWait(t *testing.T) {
	for name, p := range map[string]Policy{"zero": {}, "only a base": {BaseDelay: 100 * time.Millisecond}, "only a maximum": {MaxDelay: time.Minute}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := &Transport{Base: status(503), Policy: p}
				tr.Policy.Breaker.FailureRatio, tr.Policy.Budget.Ratio = Off, Off
				client := contract(t, tr)
				var waited time.Duration
				for range 100 {
					r := do(client, fetch(t, t.Context()))
					require.Equal(t, 3, r.report.Attempts)
					waited += r.report.Waited
				}
				require.Greater(t, waited/100, 50*time.Millisecond)
			})
		})
	}
	p := Policy{}.resolve()
	require.Equal(t, 3, p.MaxAttempts)
	require.Equal(t, 30*time.Second, p.AttemptTimeout)
	require.Equal(t, 2*time.Minute, p.MaxElapsed)
	require.Equal(t, 200*time.Millisecond, p.BaseDelay)
	require.Equal(t, 10*time.Second, p.MaxDelay)
	require.Equal(t, time.Minute, p.MaxRetryAfter)
	require.Equal(t, 15*time.Minute, p.KeyWindow)
	require.Equal(t, time.Minute, p.Breaker.Window)
	require.Equal(t, "Idempotency-Key", p.KeyHeader)
	require.EqualValues(t, 1<<20, p.MaxBodyBytes)
	require.EqualValues(t, 256<<10, p.MaxResponseBytes)
	require.Zero(t, p.RateLimit)
	require.Zero(t, p.MaxInFlight)
	require.Empty(t, p.DeadlineHeader)
	require.False(t, p.SaveRequest)
}

func TestADefaultYieldsToWhatTheCallerWrote(t *testing.T) {
	for name, c := range map[string]struct {
		p    Policy
		want func(Policy) bool
	}{
		"BaseDelay lifts MaxDelay":           {Policy{BaseDelay: 20 * time.Second}, func(p Policy) bool { return p.MaxDelay == 20*time.Second }},
		"MaxDelay lowers BaseDelay":          {Policy{MaxDelay: time.Millisecond}, func(p Policy) bool { return p.BaseDelay == time.Millisecond }},
		"AttemptTimeout lifts MaxElapsed":    {Policy{AttemptTimeout: time.Hour}, func(p Policy) bool { return p.MaxElapsed == time.Hour }},
		"MaxElapsed below the default limit": {Policy{MaxElapsed: time.Second}, func(p Policy) bool { return p.MaxElapsed == time.Second }},
		"the window follows AttemptTimeout":  {Policy{AttemptTimeout: time.Minute}, func(p Policy) bool { return p.Breaker.Window == 2*time.Minute }},
		"the window with AttemptTimeout Off": {Policy{AttemptTimeout: Off}, func(p Policy) bool { return p.Breaker.Window == 30*time.Second }},
		"a window that was written":          {Policy{Breaker: Breaker{Window: time.Second}}, func(p Policy) bool { return p.Breaker.Window == time.Second }},
		"RateLimit gives a burst of one":     {Policy{RateLimit: 5}, func(p Policy) bool { return p.RateBurst == 1 }},
		"MaxAttempts Off is one":             {Policy{MaxAttempts: Off}, func(p Policy) bool { return p.MaxAttempts == 1 }},
	} {
		require.NoError(t, (&Transport{Policy: c.p}).Validate(), name)
		require.True(t, c.want(c.p.resolve()), name)
	}
}

// Call, then entry, then Transport.Policy, then default: for every field that
// a call may set.
func TestAZeroFieldFallsBackFromCallToEntryToTransportToDefault(t *testing.T) {
	values := func(n int) Policy {
		return Policy{
			MaxAttempts: n, AttemptTimeout: time.Duration(n) * time.Second, MaxElapsed: time.Duration(n) * time.Hour,
			BaseDelay: time.Duration(n) * time.Millisecond, MaxDelay: time.Duration(n) * time.Second, MaxRetryAfter: time.Duration(n) * time.Hour,
			Keys: KeyMode(n % 2), KeyHeader: fmt.Sprint("K", n), KeyMaxLen: n, KeyWindow: time.Duration(n) * time.Minute,
			NewKey:       func(context.Context, Intent) (string, error) { return fmt.Sprint(n), nil },
			Fingerprint:  func(*http.Request, []byte) ([32]byte, error) { return [32]byte{byte(n)}, nil },
			MaxBodyBytes: int64(n), MaxResponseBytes: int64(n), DeadlineHeader: fmt.Sprint("D", n),
			Classify: func(Attempt) Verdict { return Verdict{Wait: time.Duration(n)} },
		}
	}
	call, entry, whole := values(3), values(5), values(7)
	shared := map[string]bool{"Budget": true, "Breaker": true, "RateLimit": true, "RateBurst": true, "MaxInFlight": true,
		"SaveRequest": true, "WaitInFlight": true, "FollowElsewhere": true}
	show := func(v reflect.Value) string {
		switch f := v.Interface().(type) {
		case func(context.Context, Intent) (string, error):
			if f == nil {
				return "nil"
			}
			s, _ := f(t.Context(), Intent{})
			return s
		case func(*http.Request, []byte) ([32]byte, error):
			if f == nil {
				return "nil"
			}
			b, _ := f(nil, nil)
			return fmt.Sprint(b)
		case func(Attempt) Verdict:
			if f == nil {
				return "nil"
			}
			return fmt.Sprint(f(Attempt{}))
		}
		return fmt.Sprint(v.Interface())
	}
	for f := range reflect.TypeFor[Policy]().Fields() {
		if shared[f.Name] {
			continue
		}
		for from, want := range []Policy{call, entry, whole, defaults} {
			levels := []Policy{call, entry, whole}
			for n := range from {
				field(&levels[n], f.Name).SetZero()
			}
			tr := &Transport{Policy: levels[2], Upstreams: map[string]Policy{"pay.example": levels[1]}, Base: answers(200)}
			c := &policyFinder{t, tr, levels[0]}
			require.Equal(t, show(field(&want, f.Name)), show(field(c.policy(), f.Name)), "%s from level %d", f.Name, from)
			// Without WithPolicy, the entry's.
			if from > 0 {
				none := &policyFinder{t, tr, Policy{}}
				require.Equal(t, show(field(&want, f.Name)), show(field(none.policy(), f.Name)), "%s from level %d", f.Name, from)
			}
		}
	}
}

// policyFinder finds the policy that a call would use.
type policyFinder struct {
	t    *testing.T
	tr   *Transport
	over Policy
}

func (c *policyFinder) policy() *Policy {
	ctx := c.t.Context()
	if !reflect.ValueOf(c.over).IsZero() {
		ctx = WithPolicy(ctx, c.over)
	}
	found := &call{st: c.tr.settings(), req: fetch(c.t, ctx), ctx: ctx}
	require.NoError(c.t, found.who())
	return found.pol
}

func TestWithPolicyCannotChangeWhatCallsShare(t *testing.T) {
	for name, over := range map[string]Policy{
		"Budget":      {Budget: Budget{Burst: 100}},
		"Budget Off":  {Budget: Budget{Ratio: Off}},
		"Breaker":     {Breaker: Breaker{FailureRatio: Off}},
		"RateLimit":   {RateLimit: 1},
		"RateBurst":   {RateBurst: 1},
		"MaxInFlight": {MaxInFlight: 1},
	} {
		base, store := answers(201), &flakyStore{}
		tr := &Transport{Base: base, Store: store}
		r := do(contract(t, tr), post(t, WithPolicy(t.Context(), over), "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrInvalid, name)
		require.ErrorContains(t, r.err, "WithPolicy")
		require.Equal(t, NotSent, r.report.Outcome)
		require.Empty(t, base.sent())
		require.Zero(t, store.calls())
	}
}

func TestWithPolicyIsCheckedWithWhatItOverrides(t *testing.T) {
	base := answers(201)
	tr := &Transport{Base: base, Policy: Policy{MaxDelay: time.Second}}
	for want, over := range map[string]Policy{
		"MaxAttempts is negative":     {MaxAttempts: -3},
		"BaseDelay is above MaxDelay": {BaseDelay: time.Minute},
		"KeyHeader":                   {KeyHeader: "no good"},
	} {
		r := do(contract(t, tr), post(t, WithPolicy(t.Context(), over), "", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrInvalid)
		require.ErrorContains(t, r.err, want)
	}
	require.Empty(t, base.sent())
	require.NoError(t, tr.Validate())
}

func TestWithPolicyIsOneCallsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := answers(503)
		tr := &Transport{Base: base}
		client := contract(t, tr)
		require.Equal(t, 1, do(client, fetch(t, WithPolicy(t.Context(), Policy{MaxAttempts: Off}))).report.Attempts)
		require.Equal(t, 3, do(client, fetch(t, t.Context())).report.Attempts)
		require.Equal(t, 5, do(client, fetch(t, WithPolicy(t.Context(), Policy{MaxAttempts: 5}))).report.Attempts)
	})
}

func TestSettingsThatCannotWorkFailEveryCallBeforeItIsSent(t *testing.T) {
	base, store := answers(201), &flakyStore{}
	tr := &Transport{Base: base, Store: store, Upstreams: map[string]Policy{"elsewhere.example": {BaseDelay: -1}}}
	client := contract(t, tr)
	for range 3 {
		// The strict client asserts that the body is closed.
		r := do(client, post(t, t.Context(), "charge:1", payURL, "{}"))
		require.ErrorIs(t, r.err, ErrInvalid)
		require.ErrorContains(t, r.err, `Upstreams["elsewhere.example"]: BaseDelay is negative`)
		require.Equal(t, NotSent, r.report.Outcome)
		require.ErrorContains(t, tr.Validate(), "BaseDelay")
	}
	_, err := tr.Key(post(t, t.Context(), "charge:1", payURL, ""))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, tr.Settle(post(t, t.Context(), "charge:1", payURL, ""), Done, ""), ErrInvalid)
	require.Empty(t, base.sent())
	require.Zero(t, store.calls())
}

func TestDefaultsAreNeverWrittenIntoTheCallersStruct(t *testing.T) {
	entries := map[string]Policy{"PAY.example": {Keys: KeysHonored}}
	tr := &Transport{Base: answers(201), Upstreams: entries}
	require.NoError(t, do(contract(t, tr), post(t, t.Context(), "", payURL, "{}")).err)
	require.Equal(t, map[string]Policy{"PAY.example": {Keys: KeysHonored}}, entries)
	require.Zero(t, tr.Policy.MaxAttempts)
	require.Nil(t, tr.Store)
}
