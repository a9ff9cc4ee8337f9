package faulty_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// overTransport says what a Transport makes of the faults for which it
// differs from an HTTP/1 server, most of them as net/http over HTTP/2.
var overTransport = map[faulty.Fault]string{
	faulty.LoseRequest():             "connect: connection refused",
	faulty.DropConn():                "unexpected EOF",
	faulty.DropConn().AfterHandler(): "unexpected EOF",
}

// body is a request body that knows whether it was closed.
type body struct {
	io.Reader
	mu     sync.Mutex
	closed bool
}

func (b *body) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

func (b *body) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

func TestTransportMakesTheServersFaultsWithoutSockets(t *testing.T) {
	for _, test := range faults {
		t.Run(test.fault.String(), func(t *testing.T) {
			h := new(till)
			tr := &faulty.Transport{Base: faulty.Handler(h), Script: faulty.InOrder(test.fault)}
			sent := &body{Reader: strings.NewReader("amount=5")}
			req, err := http.NewRequest("POST", "http://shop.example/charges?order=1", sent)
			require.NoError(t, err)
			req.Header["idempotency-key"] = []string{"k1"}
			before := req.Clone(t.Context())

			got := seen(do(&http.Client{Transport: tr}, req))
			if want, ok := overTransport[test.fault]; ok {
				require.Contains(t, got, want)
			} else if strings.HasPrefix(test.fault.String(), "RST_STREAM") || strings.HasPrefix(test.fault.String(), "GOAWAY") {
				require.Equal(t, test.h2, got)
			} else {
				require.Equal(t, test.h1, got)
			}
			require.Equal(t, test.charges, h.charges.Load())
			require.True(t, sent.isClosed())
			require.Equal(t, before.Header, req.Header)
			require.Equal(t, before.URL, req.URL)

			all := tr.Requests()
			require.Len(t, all, 1)
			require.Equal(t, test.charges == 1, all[0].Handled)
			require.Equal(t, "k1", all[0].Header.Get("Idempotency-Key"))
			require.Equal(t, "shop.example", all[0].Host)
			require.Equal(t, "/charges?order=1", all[0].Path)
			if test.body {
				require.Equal(t, "amount=5", string(all[0].Body))
				require.True(t, all[0].BodyComplete)
			}
		})
	}
}

func TestTransportErrorsHaveTheTypesOfNetHTTP(t *testing.T) {
	fail := func(f faulty.Fault, body io.Reader) error {
		tr := &faulty.Transport{Base: faulty.Handler(nil), Script: faulty.Always(f)}
		req, err := http.NewRequest("POST", "https://shop.example/", body)
		require.NoError(t, err)
		_, err = tr.RoundTrip(req)
		require.Error(t, err)
		return err
	}

	var op *net.OpError
	require.ErrorAs(t, fail(faulty.LoseRequest(), nil), &op)
	require.Equal(t, "dial", op.Op)
	require.Equal(t, "shop.example:443", op.Addr.String())
	require.ErrorAs(t, fail(faulty.ResetAfterBody(), nil), &op)
	require.Equal(t, "read", op.Op)
	require.ErrorIs(t, op, syscall.ECONNRESET)
	require.Equal(t, io.EOF, fail(faulty.DropRequest(), nil))

	var stream streamError
	refused := faulty.RSTStream(faulty.RefusedStream)
	require.ErrorAs(t, fail(refused, nil), &stream)
	require.EqualValues(t, faulty.RefusedStream, stream.Code)
	require.ErrorAs(t, fail(refused, strings.NewReader("rewinds")), &stream)
	require.False(t, errors.As(fail(refused, io.NopCloser(strings.NewReader("does not"))), &stream))
	var other *net.OpError
	require.False(t, errors.As(fail(refused, nil), &other))
}

// streamError is filled by errors.As: net/http's own type cannot be named.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (streamError) Error() string { return "" }

// A fault's text is what classifiers read where there is no type. It must
// be net/http's own, which the same fault on a real connection shows.
func TestTransportErrorsHaveTheTextOfNetHTTP(t *testing.T) {
	for _, f := range []faulty.Fault{
		faulty.GoAway(), faulty.RSTStream(faulty.RefusedStream), faulty.RSTStream(faulty.ProtocolError),
		faulty.RSTStream(faulty.Cancel), faulty.GoAway().AfterHandler(),
	} {
		t.Run(f.String(), func(t *testing.T) {
			s := faulty.NewHTTP2Server(nil, faulty.Always(f))
			defer s.Close()
			_, _, real := post(s.Client(), s.URL)
			tr := &faulty.Transport{Base: faulty.Handler(nil), Script: faulty.Always(f)}
			_, _, synthetic := post(&http.Client{Transport: tr}, s.URL)
			require.EqualError(t, synthetic, real.Error())
		})
	}
}

func TestOnlyALostRequestLooksUnwrittenToATrace(t *testing.T) {
	for _, test := range faults {
		t.Run(test.fault.String(), func(t *testing.T) {
			wrote, gotConn := 0, 0
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				GotConn: func(info httptrace.GotConnInfo) {
					gotConn++
					_ = info.Conn.RemoteAddr().String()
				},
				WroteHeaders: func() { wrote++ },
			})
			tr := &faulty.Transport{Base: faulty.Handler(new(till)), Script: faulty.Always(test.fault)}
			_, _, _ = postAgain(ctx, &http.Client{Transport: tr}, "http://shop.example", "")
			want := 1
			if test.fault == faulty.LoseRequest() {
				want = 0
			}
			require.Equal(t, want, wrote)
			require.Equal(t, want, gotConn)
		})
	}
}

func TestTransportStallsEndWithTheContext(t *testing.T) {
	for _, f := range []faulty.Fault{faulty.Stall(0), faulty.Stall(time.Hour), faulty.Stall(0).AfterHandler()} {
		t.Run(f.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wrote := 0
				ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteHeaders: func() { wrote++ }})
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				defer cancel()
				sent := &body{Reader: strings.NewReader("amount=5")}
				req, err := http.NewRequestWithContext(ctx, "POST", "http://shop.example/", sent)
				require.NoError(t, err)
				begin := time.Now()
				tr := &faulty.Transport{Base: faulty.Handler(new(till)), Script: faulty.Always(f)}
				_, err = tr.RoundTrip(req)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, time.Minute, time.Since(begin))
				require.True(t, sent.isClosed())
				require.Equal(t, 1, wrote, "it was on the wire")

				_, err = tr.RoundTrip(req) // its context is over
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Len(t, tr.Requests(), 1)
			})
		})
	}
}

func TestTransportClosesStaleConnectionsAfterItsFirstRequest(t *testing.T) {
	tr := &faulty.Transport{Base: faulty.Handler(new(till)), Script: faulty.Always(faulty.CloseStale())}
	c := &http.Client{Transport: tr}
	require.Equal(t, "OK charged", seen(post(c, "http://shop.example")))
	require.Equal(t, "EOF", seen(post(c, "http://shop.example")))
	require.Equal(t, []bool{false, true}, []bool{tr.Requests()[0].Reused, tr.Requests()[1].Reused})
	require.Equal(t, faulty.Pass(), tr.Requests()[0].Fault)
}

func TestTransportTakes200RequestsAtOnce(t *testing.T) {
	var all []faulty.Fault
	for _, test := range faults {
		all = append(all, test.fault)
	}
	h := new(till)
	tr := &faulty.Transport{Base: faulty.Handler(h), Script: faulty.Random(1, 0.7, all...)}
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() { post(&http.Client{Transport: tr}, "http://shop.example") })
	}
	clients.Wait()
	handled := 0
	for _, r := range tr.Requests() {
		if r.Handled {
			handled++
		}
	}
	require.Len(t, tr.Requests(), 200)
	require.EqualValues(t, h.charges.Load(), handled)
}
