// Package oncehttp makes HTTP calls to other people's APIs, payments first,
// safe to retry. Transport is a drop-in http.RoundTripper:
//
//	t := &oncehttp.Transport{
//		Upstreams: map[string]oncehttp.Policy{
//			"api.pay.example": {Keys: oncehttp.KeysHonored, KeyWindow: 24 * time.Hour},
//		},
//	}
//	ctx = oncehttp.WithIntent(ctx, "charge:order-1042")
//	resp, err := t.Client().Do(req.WithContext(ctx))
//	switch oncehttp.OutcomeOf(resp, err) { … }
//
// One intent, at most one effect, and an honest answer about what is known,
// through lost responses, retries, crashes and outages.
//
// # Words
//
// An intent is one thing the caller means to happen once; a key is the
// idempotency key sent for it, one for ever. An attempt is one hand-over to
// the base transport, a send one time on the wire: attempts are sends. An
// effect is one execution by the upstream. An outcome is what is known:
// Unknown, NotSent, Rejected or Done. An upstream is who is called, by default
// the host. A record is the durable entry of an intent in a key store. The
// window is how long the upstream honours a key after its first send.
//
// # Promises
//
//  1. Claim before send. With a durable store no byte leaves before the intent
//     and its key are durable. After a crash the same intent gets the same
//     key, never a new one. A store that cannot confirm the claim means that
//     nothing is sent (NotSent).
//  2. Retried only when safe. Safe methods and PUT and DELETE are retried.
//     POST, PATCH and every other method is retried after an ambiguous failure
//     only if its upstream is declared to honour keys, with the same key and
//     inside the window; with the same bytes within a call, with the same
//     canonical content by a later call. Otherwise only when the request
//     provably was not processed.
//  3. Every outcome is told as data, for errors and for responses.
//  4. The RoundTripper contract is kept to the letter: the request is not
//     modified, its body is always closed, any response obtained is returned
//     as a response, and it is safe for concurrent use.
//  5. Never sleep past a deadline, nor towards one that the wait would miss,
//     nor start an attempt with under 10 ms left: the last answer is returned
//     at once. Only the one write that settles may end after the deadline.
//  6. Never earlier than Retry-After asks. Longer than we accept: return at
//     once.
//  7. Load is capped: per process and upstream, attempts ≤ 1.1 × first tries +
//     10 + seconds/10, and ≤ first tries + 10 + seconds/10 while nothing
//     succeeds. With the breaker open: one probe per cool-down.
//  8. No hidden sends: net/http's own are prevented.
//  9. Nothing secret (URL query, userinfo, header values, bodies, keys) in the
//     logs and errors that we write; in stores no userinfo and no header
//     outside an allow-list.
//  10. No goroutine is left behind; memory per upstream, per waiting call and
//     in MemoryStore is bounded.
//  11. Wherever a bare http.Client delivers, we deliver: its provably safe
//     sends on stale connections are not lost.
//
// What is not promised: an effect exactly once where the upstream does not
// honour keys, or past its window. There an ambiguous failure ends Unknown,
// for the caller to look up.
package oncehttp
