package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/faulty"
)

// A scene is one thing that goes wrong between a shop and its provider. It is
// played to every client alike.
type scene struct {
	name    string
	sandbox sandboxSettings
	faults  faulty.Script   // what befalls the requests
	policy  oncehttp.Policy // how oncehttp is told to call the provider
	act     func(ctx context.Context, pay payer) []told
	note    func(plain, once run) string // what the table has no column for
	others  []variant                    // further policies to play it with, for comparison

	// If dies is set, the shop is a process that is killed then and started
	// again, so much later, for the same order; act is not used.
	dies  moment
	later time.Duration
}

type sandboxSettings struct {
	ignoresKeys bool
	bank        time.Duration
}

type variant struct {
	name   string
	policy oncehttp.Policy
}

// payer is pay, or payPlain, with its client.
type payer func(context.Context, Order) (Payment, error)

// told is what a client said about an order.
type told struct {
	order   Order
	payment Payment
	err     error
}

// honored is for a provider that documents what it does with keys. The delay
// is short so that the scenes are.
var honored = oncehttp.Policy{Keys: oncehttp.KeysHonored, KeyWindow: 24 * time.Hour, BaseDelay: 20 * time.Millisecond}

func with(p oncehttp.Policy, change func(*oncehttp.Policy)) oncehttp.Policy {
	change(&p)
	return p
}

// scenes returns all scenes, in the order in which they are played.
func scenes() []scene {
	const outageCalls = 200
	breakerOff := oncehttp.Breaker{FailureRatio: oncehttp.Off}
	return []scene{{
		name:   "response lost after the charge",
		faults: faulty.InOrder(faulty.LoseResponse()),
		policy: honored,
		act:    one,
	}, {
		// 503 does not say that nothing was done: here a gateway gave up on
		// a backend that went on.
		name:   "503 + Retry-After: 1 by a gateway",
		faults: faulty.InOrder(faulty.Status(503, "Retry-After", "1").AfterHandler()),
		policy: honored,
		act:    one,
		note: func(plain, once run) string {
			return fmt.Sprintf("asked to wait 1 s, the plain loop was back after %.2f s, oncehttp after %.2f s",
				plain.secondSend().Seconds(), once.secondSend().Seconds())
		},
	}, {
		// The second attempt is told 409, as the first is still at work.
		name:    "timeout while the charge runs",
		sandbox: sandboxSettings{bank: 600 * time.Millisecond},
		policy:  with(honored, func(p *oncehttp.Policy) { p.AttemptTimeout = 200 * time.Millisecond }),
		act:     one,
	}, {
		name:   "201 with half its body",
		faults: faulty.InOrder(faulty.Truncate(12)),
		policy: honored,
		act:    one,
	}, {
		// The second order goes over the first one's connection, which the
		// server closes after the charge.
		name:   "keep-alive connection closed",
		faults: faulty.InOrder(faulty.Pass(), faulty.CloseStale().AfterHandler()),
		policy: honored,
		act: func(ctx context.Context, pay payer) []told {
			return []told{ask(ctx, pay, newOrder(1)), ask(ctx, pay, newOrder(2))}
		},
	}, {
		name:    "the same order twice at once",
		sandbox: sandboxSettings{bank: 100 * time.Millisecond},
		policy:  with(honored, func(p *oncehttp.Policy) { p.WaitInFlight = true }),
		act: func(ctx context.Context, pay payer) []told {
			return atOnce(2, 2, func(int) told { return ask(ctx, pay, newOrder(1)) })
		},
	}, {
		name:   "the same order, another amount",
		policy: honored,
		act: func(ctx context.Context, pay payer) []told {
			changed := newOrder(1)
			changed.Amount += 1000
			return []told{ask(ctx, pay, newOrder(1)), ask(ctx, pay, changed)}
		},
	}, {
		// Keys are sent all the same, but nothing relies on them.
		name:    "response lost, keys not honoured",
		sandbox: sandboxSettings{ignoresKeys: true},
		faults:  faulty.InOrder(faulty.LoseResponse()),
		policy:  with(honored, func(p *oncehttp.Policy) { p.Keys, p.KeyWindow = oncehttp.KeysSent, 0 }),
		act:     one,
	}, {
		name:   fmt.Sprintf("full outage, %d orders", outageCalls),
		faults: faulty.Always(faulty.Status(503)),
		policy: with(honored, func(p *oncehttp.Policy) { p.MaxAttempts, p.Breaker = 4, breakerOff }),
		act: func(ctx context.Context, pay payer) []told {
			return atOnce(outageCalls, 20, func(i int) told { return ask(ctx, pay, newOrder(i)) })
		},
		others: []variant{
			{"the same without the budget", with(honored, func(p *oncehttp.Policy) {
				p.MaxAttempts, p.Breaker, p.Budget.Ratio = 4, breakerOff, oncehttp.Off
			})},
			{"the same with the breaker too, as by default", with(honored, func(p *oncehttp.Policy) { p.MaxAttempts = 4 })},
		},
	}, {
		name:   "Retry-After: 30, deadline in 5 s",
		faults: faulty.Always(faulty.Status(503, "Retry-After", "30")),
		policy: honored,
		act: func(ctx context.Context, pay payer) []told {
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			return one(ctx, pay)
		},
		note: func(_, once run) string {
			r := once.told[0].payment.Report
			return fmt.Sprintf("oncehttp returned the %d at once: waited %v, %v", r.Status, r.Waited, r.Reason)
		},
	}, {
		name:   "killed between charge and answer",
		policy: honored,
		dies:   beforeAnswer,
		note: func(_, once run) string {
			return fmt.Sprintf("started again, the shop sent the %s key, and got the answer %s", once.sameKey(), once.told[0].payment.Charge)
		},
	}, {
		name:   "killed before sending",
		policy: honored,
		dies:   beforeSending,
	}, {
		name:   "killed after the answer was saved",
		policy: honored,
		dies:   afterPaying,
		note: func(_, once run) string {
			p := once.told[0].payment
			return fmt.Sprintf("started again, the shop got the saved answer %s by %d sends", p.Charge, p.Report.Attempts)
		},
	}, {
		// The provider has forgotten the key: under it, or under any other, a
		// second send would be a second charge.
		name:   "killed as in 11, back after 25 h",
		policy: honored,
		dies:   beforeAnswer,
		later:  25 * time.Hour,
		note: func(_, once run) string {
			return fmt.Sprintf("oncehttp: %v", once.told[0].err)
		},
	}}
}

func sceneNamed(name string) (scene, error) {
	for _, s := range scenes() {
		if s.name == name {
			return s, nil
		}
	}
	return scene{}, fmt.Errorf("there is no scene %q", name)
}

func newOrder(n int) Order {
	return Order{ID: fmt.Sprint(1000 + n), Amount: 4990, Currency: "EUR"}
}

func ask(ctx context.Context, pay payer, order Order) told {
	p, err := pay(ctx, order)
	return told{order, p, err}
}

func one(ctx context.Context, pay payer) []told {
	return []told{ask(ctx, pay, newOrder(1))}
}

// atOnce makes n calls from so many goroutines, which start together.
func atOnce(n, goroutines int, call func(i int) told) []told {
	all := make([]told, n)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			<-start
			for i := g; i < n; i += goroutines {
				all[i] = call(i)
			}
		})
	}
	close(start)
	wg.Wait()
	return all
}
