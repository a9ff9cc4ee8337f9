package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/oncehttp/oncehttp"
)

const chargesURL = "http://" + provider + "/charges"

// An Order is what the shop wants to be paid for, as the provider takes it.
type Order struct {
	ID       string `json:"order"`
	Amount   int64  `json:"amount"` // in cents
	Currency string `json:"currency"`
}

// A Payment is what the shop knows about an order's charge.
type Payment struct {
	Charge  string           `json:"charge"` // the provider's id of it
	Outcome oncehttp.Outcome `json:"-"`      // what to act on
	Report  oncehttp.Report  `json:"-"`      // how it came about, for the log
}

// pay charges an order, once. The error is nil only if it is paid. Calling pay
// again for the same order is safe, whatever became of the call before; after a
// crash too, if the Transport has a durable Store.
func pay(ctx context.Context, client *http.Client, order Order) (Payment, error) {
	var p Payment
	body, err := json.Marshal(order)
	if err != nil {
		return p, err
	}

	// The intent is named after what is paid for: not after the amount or the
	// time, which a second try may have different.
	ctx = oncehttp.WithIntent(ctx, "charge:order-"+order.ID)
	ctx = oncehttp.WithReport(ctx, &p.Report)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, chargesURL, bytes.NewReader(body))
	if err != nil {
		return p, err
	}
	req.Header.Set("Content-Type", "application/json")

	// Read the answer first: until it has ended, its outcome is provisional.
	resp, err := client.Do(req)
	var answer []byte
	if err == nil {
		answer, err = io.ReadAll(resp.Body)
		resp.Body.Close()
	}

	p.Outcome = oncehttp.OutcomeOf(resp, err)
	switch p.Outcome {
	case oncehttp.Done:
		// Paid. That the answer may be unreadable does not change it.
		_ = json.Unmarshal(answer, &p)
		return p, nil
	case oncehttp.Rejected:
		return p, fmt.Errorf("order %s: the provider said no with status %d; tell the customer", order.ID, p.Report.Status)
	case oncehttp.NotSent:
		if errors.Is(err, oncehttp.ErrIntentMismatch) {
			return p, fmt.Errorf("order %s: it has changed since it was first charged; this is a bug of ours: %w", order.ID, err)
		}
		return p, fmt.Errorf("order %s: not charged; try again, or let the customer pay otherwise: %w", order.ID, err)
	default:
		if err == nil {
			err = fmt.Errorf("status %d: %w", resp.StatusCode, p.Report.Reason)
		}
		return p, fmt.Errorf("order %s: may be charged or not; keep it pending, and pay again or look it up: %w", order.ID, err)
	}
}
