package faulty_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// seen is what a client has of one request: "200 charged", or the error's
// name in errorName, after the status if there was one.
func seen(status int, body string, err error) string {
	var s []string
	if status != 0 {
		s = append(s, http.StatusText(status), body)
	}
	if err != nil {
		s = append(s, errorName(err))
	}
	return strings.Join(s, " ")
}

func errorName(err error) string {
	text := err.Error()
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.ErrClosedPipe):
		return "reset"
	case strings.Contains(text, "GOAWAY and closed"):
		return "GOAWAY and closed"
	case strings.Contains(text, "graceful shutdown GOAWAY"):
		return "GOAWAY"
	case strings.Contains(text, "stream error"):
		for _, code := range []string{"PROTOCOL_ERROR", "INTERNAL_ERROR", "REFUSED_STREAM", "CANCEL", "ENHANCE_YOUR_CALM"} {
			if strings.Contains(text, code) {
				return code
			}
		}
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "unexpected EOF"
	case errors.Is(err, io.EOF):
		return "EOF"
	}
	return text
}

// faults says what each fault is to a bare http.Client that sends a POST
// once, on a fresh connection.
var faults = []struct {
	fault   faulty.Fault
	h1, h2  string // what the client sees
	charges int32  // what the handler has done
	body    bool   // the request was read whole
}{
	{faulty.Pass(), "OK charged", "OK charged", 1, true},
	{faulty.Drain(), "OK charged", "OK charged", 1, true},
	{faulty.CloseStale(), "OK charged", "OK charged", 1, true}, // the connection is fresh
	{faulty.CloseStale().AfterHandler(), "OK charged", "OK charged", 1, true},
	{faulty.LoseRequest(), "reset", "INTERNAL_ERROR", 0, false},
	{faulty.ResetBeforeBody(), "reset", "INTERNAL_ERROR", 0, false},
	{faulty.ResetBeforeBody().AfterHandler(), "reset", "INTERNAL_ERROR", 0, false}, // there is no such form
	{faulty.ResetAfterBody(), "reset", "INTERNAL_ERROR", 0, true},
	{faulty.ResetAfterBody().AfterHandler(), "reset", "INTERNAL_ERROR", 1, true},
	{faulty.DropRequest(), "EOF", "INTERNAL_ERROR", 0, true},
	{faulty.LoseResponse(), "EOF", "INTERNAL_ERROR", 1, true},
	{faulty.DropConn(), "EOF", "unexpected EOF", 0, true},
	{faulty.DropConn().AfterHandler(), "EOF", "unexpected EOF", 1, true},
	{faulty.Truncate(3), "OK cha unexpected EOF", "OK cha INTERNAL_ERROR", 1, true},
	{faulty.Truncate(0), "OK  unexpected EOF", "OK  INTERNAL_ERROR", 1, true},
	{faulty.Truncate(99), "OK charged unexpected EOF", "OK charged INTERNAL_ERROR", 1, true},
	{faulty.TruncateChunked(3), "OK cha unexpected EOF", "OK cha INTERNAL_ERROR", 1, true},
	{faulty.TruncateChunked(99), "OK charged unexpected EOF", "OK charged INTERNAL_ERROR", 1, true},
	{faulty.Stall(time.Nanosecond), "OK charged", "OK charged", 1, true},
	{faulty.Stall(time.Nanosecond).AfterHandler(), "OK charged", "OK charged", 1, true},
	{faulty.Status(503), "Service Unavailable Service Unavailable\n", "Service Unavailable Service Unavailable\n", 0, true},
	{faulty.Status(502).AfterHandler(), "Bad Gateway Bad Gateway\n", "Bad Gateway Bad Gateway\n", 1, true},
	{faulty.Status(204), "No Content ", "No Content ", 0, true},
	{faulty.RSTStream(faulty.RefusedStream), "EOF", "REFUSED_STREAM", 0, false},
	{faulty.RSTStream(faulty.RefusedStream).AfterHandler(), "EOF", "REFUSED_STREAM", 1, true},
	{faulty.RSTStream(faulty.ProtocolError), "EOF", "PROTOCOL_ERROR", 0, false},
	{faulty.RSTStream(faulty.InternalError), "EOF", "INTERNAL_ERROR", 0, false},
	{faulty.RSTStream(faulty.Cancel), "EOF", "CANCEL", 0, false},
	{faulty.RSTStream(faulty.EnhanceYourCalm).AfterHandler(), "EOF", "ENHANCE_YOUR_CALM", 1, true},
	{faulty.GoAway(), "EOF", "GOAWAY", 0, false},
	{faulty.GoAway().AfterHandler(), "EOF", "GOAWAY and closed", 1, true},
}

func TestWhatABareClientSeesOfEachFault(t *testing.T) {
	for kind, start := range kinds {
		for _, test := range faults {
			t.Run(kind+"/"+test.fault.String(), func(t *testing.T) {
				h := new(till)
				s := start(h, faulty.InOrder(test.fault))
				defer s.Close()
				c := s.Client()

				want := test.h1
				if kind == "h2" {
					want = test.h2
				}
				require.Equal(t, want, seen(post(c, s.URL)))

				sent := s.Requests()
				require.Len(t, sent, 1)
				r := sent[0]
				require.Equal(t, test.charges, h.charges.Load())
				require.Equal(t, test.charges == 1, r.Handled)
				require.Equal(t, "POST", r.Method)
				require.Equal(t, "/charges?order=1", r.Path)
				require.Equal(t, "k1", r.Header.Get("Idempotency-Key"))
				require.Equal(t, kind == "h2", r.Proto == "HTTP/2.0")
				require.NotEmpty(t, r.RemoteAddr)
				require.False(t, r.Reused)
				if test.body || kind != "h2" && want == "EOF" {
					require.Equal(t, "amount=5", string(r.Body))
					require.EqualValues(t, 8, r.BodySize)
					require.True(t, r.BodyComplete)
				}

				require.Equal(t, "OK charged", seen(post(c, s.URL)), "the script is over")
				require.Len(t, s.Requests(), 2)
			})
		}
	}
}

func TestStatusHasItsHeader(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(nil, faulty.Always(faulty.Status(429, "Retry-After", "7", "X-Limit", "a", "X-Limit", "b")))
			defer s.Close()
			resp, err := s.Client().Get(s.URL)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, 429, resp.StatusCode)
			require.Equal(t, "7", resp.Header.Get("Retry-After"))
			require.Equal(t, []string{"a", "b"}, resp.Header.Values("X-Limit"))
		})
	}
}

func TestTruncateKeepsOrDropsTheContentLength(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(new(till), faulty.InOrder(faulty.Truncate(3), faulty.TruncateChunked(3)))
			defer s.Close()
			for _, length := range []int64{7, -1} {
				resp, err := s.Client().Get(s.URL)
				require.NoError(t, err)
				_, err = io.ReadAll(resp.Body)
				require.Error(t, err)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, length, resp.ContentLength)
			}
		})
	}
}

func TestAnAnswerWithoutABodyIsNotTruncated(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(new(till), faulty.Always(faulty.Truncate(3)))
			defer s.Close()
			resp, err := s.Client().Head(s.URL)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, 200, resp.StatusCode)
		})
	}
}

func TestAStallEndsWhenTheClientGivesUpAndTheHandlerNeverRuns(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			h := new(till)
			ctx, cancel := context.WithCancel(t.Context())
			s := start(h, func(n int, r *http.Request) faulty.Fault {
				cancel() // it has arrived
				return faulty.Stall(0)
			})
			defer s.Close()
			req, err := http.NewRequestWithContext(ctx, "POST", s.URL, strings.NewReader("amount=5"))
			require.NoError(t, err)
			_, _, err = do(s.Client(), req)
			require.ErrorIs(t, err, context.Canceled)
			s.Close()
			require.Len(t, s.Requests(), 1)
			require.False(t, s.Requests()[0].Handled)
			require.Zero(t, h.charges.Load())
		})
	}
}

func TestAStallAfterTheHandlerLosesOnlyTheAnswer(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			s := start(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { cancel() }),
				faulty.Always(faulty.Stall(time.Hour).AfterHandler()))
			defer s.Close()
			req, err := http.NewRequestWithContext(ctx, "GET", s.URL, nil)
			require.NoError(t, err)
			_, _, err = do(s.Client(), req)
			require.ErrorIs(t, err, context.Canceled)
			require.True(t, s.Requests()[0].Handled)
		})
	}
}

func TestCloseEndsStalls(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			arrived := make(chan struct{})
			s := start(nil, func(int, *http.Request) faulty.Fault {
				close(arrived)
				return faulty.Stall(0)
			})
			failed := make(chan error)
			go func() {
				_, _, err := post(s.Client(), s.URL)
				failed <- err
			}()
			<-arrived
			s.Close()
			require.Error(t, <-failed)
			s.Close()
		})
	}
}

func TestARefusedConnectionCarriesNoRequest(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(new(till), nil)
			defer s.Close()
			s.Refuse(-1)
			_, _, err := post(s.Client(), s.URL)
			require.Error(t, err)
			_, _, err = post(s.Client(), s.URL)
			require.Error(t, err)
			s.Refuse(1)
			_, _, err = post(s.Client(), s.URL)
			require.Error(t, err)
			require.Empty(t, s.Requests())
			require.Equal(t, "OK charged", seen(post(s.Client(), s.URL)))
		})
	}
}

func TestAScriptCountsFromOneAndCanBeReplaced(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(nil, func(n int, r *http.Request) faulty.Fault {
				if r.URL.Path != "/charges" || r.Method != "POST" || r.Header.Get("Idempotency-Key") != "k1" {
					return faulty.DropRequest()
				}
				return faulty.Status(300 + n)
			})
			defer s.Close()
			c := s.Client()
			for n := 1; n <= 3; n++ {
				status, _, err := post(c, s.URL)
				require.NoError(t, err)
				require.Equal(t, 300+n, status)
			}
			s.SetScript(faulty.InOrder(faulty.Status(418)))
			s.SetHandler(new(till))
			status, _, err := post(c, s.URL)
			require.NoError(t, err)
			require.Equal(t, 418, status)
			require.Equal(t, "OK charged", seen(post(c, s.URL)))
		})
	}
}

// Whatever happens to it, a request is recorded once and a charge is
// recorded as handled. One client per request: a connection that breaks
// takes no other request with it.
func TestCountsAreExactWith200RequestsAtOnce(t *testing.T) {
	var all []faulty.Fault
	for _, test := range faults {
		all = append(all, test.fault)
	}
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			h := new(till)
			s := start(h, faulty.Random(1, 0.7, all...))
			defer s.Close()
			var clients sync.WaitGroup
			for range 200 {
				clients.Go(func() { post(s.Client(), s.URL) })
			}
			clients.Wait()
			s.Close()
			require.Len(t, s.Requests(), 200)
			handled := 0
			for _, r := range s.Requests() {
				if r.Handled {
					handled++
				}
			}
			require.EqualValues(t, h.charges.Load(), handled)
			require.NotZero(t, handled)
			require.Less(t, handled, 200)
		})
	}
}

func TestAClientThatBreaksOffItsBodyEndsAStall(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			h := new(till)
			arrived := make(chan struct{})
			s := start(h, func(int, *http.Request) faulty.Fault {
				close(arrived)
				return faulty.Stall(0)
			})
			defer s.Close()
			half, rest := io.Pipe()
			go func() {
				rest.Write([]byte("amo"))
				<-arrived
				rest.CloseWithError(errors.New("the disk is gone"))
			}()
			_, err := s.Client().Post(s.URL, "", half)
			require.ErrorContains(t, err, "the disk is gone")
			s.Close()
			require.Len(t, s.Requests(), 1)
			require.False(t, s.Requests()[0].BodyComplete)
			require.Zero(t, h.charges.Load())
		})
	}
}

func TestAHandlerMayCloseTheBody(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { r.Body.Close() }),
				faulty.Always(faulty.Status(502).AfterHandler()))
			defer s.Close()
			status, _, err := post(s.Client(), s.URL)
			require.NoError(t, err)
			require.Equal(t, 502, status)
		})
	}
}

func TestCloseTakesAwayConnectionsThatNobodyUses(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(nil, nil)
			_, addr, _ := strings.Cut(s.URL, "://")
			c, err := net.Dial("tcp", addr) // sends nothing, not even a handshake
			require.NoError(t, err)
			defer c.Close()
			s.Close()
			_, err = c.Read(make([]byte, 1))
			require.Error(t, err)
		})
	}
}
