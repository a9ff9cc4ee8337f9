package oncehttp

import (
	"context"
	"log/slog"
	"time"
)

// A Trace holds functions that are called as a call goes on, for logs, metrics
// and spans. Any of them may be nil. They are called by the goroutine of the
// call, never while a lock is held, and must be safe for concurrent use.
type Trace struct {
	// AttemptStart is called before each attempt and returns the context to
	// make it with, derived from ctx: a span goes in here.
	AttemptStart func(ctx context.Context, a AttemptInfo) context.Context
	// AttemptDone is called with that context when the attempt has ended.
	AttemptDone func(ctx context.Context, a AttemptInfo)
	// Wait is called before a wait between two attempts, or for the rate limit.
	Wait func(ctx context.Context, w WaitInfo)
	// CallDone is called when RoundTrip is about to return. If the answer's
	// body is still to be read, the outcome is provisional.
	CallDone func(ctx context.Context, r Report)
	// StoreError is called when the key store failed: op is "claim", "renew"
	// or "settle". After a failed settle the caller still gets the answer.
	StoreError func(ctx context.Context, recordID, op string, err error)
	// BreakerChange is called when an upstream's breaker has changed between
	// "closed", "open" and "half-open".
	BreakerChange func(upstream, from, to string)
}

// AttemptInfo describes an attempt. Nothing in it is secret but Err, which is
// the base's and may hold a URL.
type AttemptInfo struct {
	Upstream string
	RecordID string // "" if the intent has no record
	Method   string
	N        int           // 1 for the call's first attempt
	Status   int           // when done: the answer's, or 0
	Err      error         // when done: the base's error
	Elapsed  time.Duration // when done
	Verdict  VerdictKind   // when done
}

// WaitInfo describes a wait.
type WaitInfo struct {
	Upstream string
	RecordID string
	N        int           // of the attempt that follows
	Delay    time.Duration // how long we shall wait
	Asked    bool          // the upstream asked for it (Retry-After)
}

// JoinTraces returns a Trace that calls all of them in order. Nils are left
// out. Contexts of AttemptStart nest; AttemptDone is called in reverse.
func JoinTraces(traces ...*Trace) *Trace {
	var all []*Trace
	for _, t := range traces {
		if t != nil {
			all = append(all, t)
		}
	}
	return &Trace{
		AttemptStart: func(ctx context.Context, a AttemptInfo) context.Context {
			for _, t := range all {
				ctx = t.attemptStart(ctx, a)
			}
			return ctx
		},
		AttemptDone: func(ctx context.Context, a AttemptInfo) {
			for i := len(all) - 1; i >= 0; i-- {
				all[i].attemptDone(ctx, a)
			}
		},
		Wait: func(ctx context.Context, w WaitInfo) {
			for _, t := range all {
				t.wait(ctx, w)
			}
		},
		CallDone: func(ctx context.Context, r Report) {
			for _, t := range all {
				t.callDone(ctx, r)
			}
		},
		StoreError: func(ctx context.Context, recordID, op string, err error) {
			for _, t := range all {
				t.storeError(ctx, recordID, op, err)
			}
		},
		BreakerChange: func(upstream, from, to string) {
			for _, t := range all {
				t.breakerChange(upstream, from, to)
			}
		},
	}
}

// LogTrace logs attempts and waits at debug level, calls that did not end
// well, store errors and breaker changes at warn level. It writes no key, URL,
// header or body; upstream names and record ids stand for them.
func LogTrace(l *slog.Logger) *Trace {
	return &Trace{
		AttemptDone: func(ctx context.Context, a AttemptInfo) {
			attrs := []slog.Attr{
				slog.String("upstream", a.Upstream), slog.String("record", a.RecordID), slog.String("method", a.Method),
				slog.Int("attempt", a.N), slog.Int("status", a.Status), slog.Duration("elapsed", a.Elapsed),
			}
			if a.Err != nil {
				attrs = append(attrs, slog.String("error", safeText(a.Err)))
			}
			l.LogAttrs(ctx, slog.LevelDebug, "oncehttp: attempt", attrs...)
		},
		Wait: func(ctx context.Context, w WaitInfo) {
			l.LogAttrs(ctx, slog.LevelDebug, "oncehttp: wait", slog.String("upstream", w.Upstream), slog.String("record", w.RecordID),
				slog.Int("before", w.N), slog.Duration("delay", w.Delay), slog.Bool("asked", w.Asked))
		},
		CallDone: func(ctx context.Context, r Report) {
			level := slog.LevelDebug
			attrs := []slog.Attr{
				slog.String("upstream", r.Upstream), slog.String("record", r.RecordID), slog.String("outcome", r.Outcome.String()),
				slog.Int("attempts", r.Attempts), slog.Int("status", r.Status), slog.Bool("replayed", r.Replayed),
			}
			if r.Reason != nil {
				level = slog.LevelWarn
				attrs = append(attrs, slog.String("reason", r.Reason.Error()))
			}
			l.LogAttrs(ctx, level, "oncehttp: call", attrs...)
		},
		StoreError: func(ctx context.Context, recordID, op string, err error) {
			l.LogAttrs(ctx, slog.LevelWarn, "oncehttp: key store", slog.String("record", recordID), slog.String("op", op), slog.String("error", safeText(err)))
		},
		BreakerChange: func(upstream, from, to string) {
			l.Warn("oncehttp: breaker", slog.String("upstream", upstream), slog.String("from", from), slog.String("to", to))
		},
	}
}

// The methods below let a nil Trace, and a nil function in one, be called.

func (t *Trace) attemptStart(ctx context.Context, a AttemptInfo) context.Context {
	if t == nil || t.AttemptStart == nil {
		return ctx
	}
	if started := t.AttemptStart(ctx, a); started != nil {
		return started
	}
	return ctx
}

func (t *Trace) attemptDone(ctx context.Context, a AttemptInfo) {
	if t != nil && t.AttemptDone != nil {
		t.AttemptDone(ctx, a)
	}
}

func (t *Trace) wait(ctx context.Context, w WaitInfo) {
	if t != nil && t.Wait != nil {
		t.Wait(ctx, w)
	}
}

func (t *Trace) callDone(ctx context.Context, r Report) {
	if t != nil && t.CallDone != nil {
		t.CallDone(ctx, r)
	}
}

func (t *Trace) storeError(ctx context.Context, recordID, op string, err error) {
	if t != nil && t.StoreError != nil {
		t.StoreError(ctx, recordID, op, err)
	}
}

func (t *Trace) breakerChange(upstream, from, to string) {
	if t != nil && t.BreakerChange != nil {
		t.BreakerChange(upstream, from, to)
	}
}
