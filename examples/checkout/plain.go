package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// payPlain is the loop that pay replaces: four attempts, a growing pause, no
// key. It is what most services have.
func payPlain(ctx context.Context, client *http.Client, order Order) (p Payment, err error) {
	body, _ := json.Marshal(order)
	for attempt := range 4 {
		if attempt > 0 {
			time.Sleep(10 * time.Millisecond << attempt)
		}
		var answer []byte
		answer, err = postOnce(ctx, client, body)
		if err == nil {
			return p, json.Unmarshal(answer, &p)
		}
	}
	return p, fmt.Errorf("order %s failed: %w", order.ID, err)
}

func postOnce(ctx context.Context, client *http.Client, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, chargesURL, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	return io.ReadAll(resp.Body)
}
