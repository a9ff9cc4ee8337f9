package main

import (
	"fmt"
	"slices"

	"github.com/oncehttp/oncehttp"
)

// audit holds what was told against the ledger, and returns what must not be:
// an order that was charged twice, and an outcome that is not true. Unknown is
// always true; it is what must be rare. A scene that broke off proves nothing.
func (r run) audit() []string {
	var wrong []string
	if r.broken != nil {
		wrong = append(wrong, fmt.Sprintf("the scene could not be played: %v", r.broken))
	}
	perOrder := make(map[string]int)
	for _, charged := range r.ledger {
		perOrder[charged.ID]++
	}
	for _, id := range r.orders() {
		if n := perOrder[id]; n > 1 {
			wrong = append(wrong, fmt.Sprintf("order %s was charged %d times", id, n))
		}
	}
	for _, t := range r.told {
		charged := slices.Contains(r.ledger, t.order) // the very request: order and amount
		switch o := t.payment.Outcome; {
		case o == oncehttp.Done && !charged:
			wrong = append(wrong, fmt.Sprintf("order %s: told done, but the ledger has no charge", t.order.ID))
		case (o == oncehttp.NotSent || o == oncehttp.Rejected) && charged:
			wrong = append(wrong, fmt.Sprintf("order %s: told %v, but it was charged", t.order.ID, o))
		}
	}
	return wrong
}

// orders returns the ids of what the shop meant to be paid for: the intents.
func (r run) orders() []string {
	var ids []string
	for _, t := range r.told {
		ids = append(ids, t.order.ID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// tooMany is how many charges there are beyond one for each order.
func (r run) tooMany() int {
	paid := make(map[string]bool)
	for _, charged := range r.ledger {
		paid[charged.ID] = true
	}
	return len(r.ledger) - len(paid)
}
