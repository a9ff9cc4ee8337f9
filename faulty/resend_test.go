package faulty_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// postAgain sends a POST that net/http may send again: its body rewinds.
func postAgain(ctx context.Context, c *http.Client, url, key string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader("amount=5"))
	if err != nil {
		return 0, "", err
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return do(c, req)
}

// idle makes the client hold n idle connections.
func idle(t *testing.T, s *faulty.Server, c *http.Client, n int) {
	t.Helper()
	var together, done sync.WaitGroup
	together.Add(n)
	s.SetHandler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		together.Done()
		together.Wait()
	}))
	for range n {
		done.Go(func() {
			resp, err := c.Get(s.URL)
			if err != nil {
				t.Error(err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		})
	}
	done.Wait()
}

func TestNetHTTPSendsAKeyedPostOnEveryStaleConnection(t *testing.T) {
	for _, test := range []struct {
		key   string
		fault faulty.Fault
		sends int
		want  string
	}{
		{"", faulty.CloseStale(), 1, "EOF"},
		{"k1", faulty.CloseStale(), 6, "OK charged"},
		{"k1", faulty.CloseStale().AfterHandler(), 6, "OK charged"},
	} {
		t.Run(test.key+test.fault.String(), func(t *testing.T) {
			s := faulty.NewServer(nil, nil)
			defer s.Close()
			c := s.Client()
			idle(t, s, c, 5)
			h := new(till)
			s.SetHandler(h)
			s.SetScript(faulty.Always(test.fault))
			require.Equal(t, test.want, seen(postAgain(t.Context(), c, s.URL, test.key)))

			sent := s.Requests()[5:]
			require.Len(t, sent, test.sends)
			struck, handled := 0, 0
			for _, r := range sent {
				if r.Fault == test.fault {
					require.True(t, r.Reused)
					struck++
				}
				if r.Handled {
					handled++
				}
			}
			require.Equal(t, min(test.sends, 5), struck)
			require.EqualValues(t, h.charges.Load(), handled)
		})
	}
}

func TestCloseStaleTakesAnHTTP2ConnectionDown(t *testing.T) {
	s := faulty.NewHTTP2Server(new(till), faulty.Always(faulty.CloseStale()))
	defer s.Close()
	c := s.Client()
	require.Equal(t, "OK charged", seen(post(c, s.URL)))
	require.Equal(t, "unexpected EOF", seen(post(c, s.URL)))
	require.Equal(t, "OK charged", seen(post(c, s.URL)))
	sent := s.Requests()
	require.Len(t, sent, 3)
	require.Equal(t, []bool{false, true, false}, []bool{sent[0].Reused, sent[1].Reused, sent[2].Reused})
	require.Equal(t, sent[0].RemoteAddr, sent[1].RemoteAddr)
	require.NotEqual(t, sent[1].RemoteAddr, sent[2].RemoteAddr)
	require.False(t, sent[1].Handled)
}

func TestCloseIdleClosesWhatIsIdle(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(new(till), nil)
			defer s.Close()
			c := s.Client()
			for range 4 {
				for { // it may fail while the client has not noticed
					if _, _, err := post(c, s.URL); err == nil {
						break
					}
				}
				s.CloseIdle()
			}
			handled := 0
			for _, r := range s.Requests() {
				if r.Handled {
					require.False(t, r.Reused, "every connection was closed after one request")
					handled++
				}
			}
			require.Equal(t, 4, handled)
		})
	}
}

func TestCloseIdleLetsARequestEnd(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			var s *faulty.Server
			s = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				s.CloseIdle()
				io.WriteString(w, "charged")
			}), nil)
			defer s.Close()
			c := s.Client()
			require.Equal(t, "OK charged", seen(post(c, s.URL)))
		})
	}
}

func TestDrainEndsTheConnectionNotTheRequest(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := start(new(till), faulty.Always(faulty.Drain()))
			defer s.Close()
			c := s.Client()
			for range 3 {
				require.Equal(t, "OK charged", seen(post(c, s.URL)))
			}
			for _, r := range s.Requests() {
				require.False(t, r.Reused)
			}
		})
	}
}

func TestNetHTTPSendsAgainOverHTTP2WithoutBeingAsked(t *testing.T) {
	for _, fault := range []faulty.Fault{
		faulty.GoAway(),
		faulty.RSTStream(faulty.RefusedStream),
	} {
		t.Run(fault.String(), func(t *testing.T) {
			h := new(till)
			s := faulty.NewHTTP2Server(h, faulty.InOrder(fault))
			defer s.Close()
			require.Equal(t, "OK charged", seen(postAgain(t.Context(), s.Client(), s.URL, "")))
			sent := s.Requests()
			require.Len(t, sent, 2)
			require.Equal(t, fault, sent[0].Fault)
			require.False(t, sent[0].Handled)
			require.EqualValues(t, 1, h.charges.Load())
		})
	}
}

// Go 1.26 takes PROTOCOL_ERROR for a refusal; 1.27 does not any more.
func TestNetHTTPSendsAPostHundredsOfTimes(t *testing.T) {
	for _, fault := range []faulty.Fault{
		faulty.GoAway(),
		faulty.RSTStream(faulty.ProtocolError),
	} {
		t.Run(fault.String(), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			h := new(till)
			s := faulty.NewHTTP2Server(h, func(n int, r *http.Request) faulty.Fault {
				if n == 20 {
					cancel()
				}
				return fault
			})
			defer s.Close()
			_, _, err := postAgain(ctx, s.Client(), s.URL, "")
			require.Error(t, err)
			s.Close()
			require.Greater(t, len(s.Requests()), 5)
			require.Zero(t, h.charges.Load())
		})
	}
}

func TestTheOtherHTTP2ErrorsAreNotRepeated(t *testing.T) {
	for _, fault := range []faulty.Fault{
		faulty.RSTStream(faulty.InternalError),
		faulty.RSTStream(faulty.Cancel),
		faulty.RSTStream(faulty.EnhanceYourCalm),
		faulty.DropConn(),
		faulty.GoAway().AfterHandler(),
		faulty.LoseResponse(),
	} {
		t.Run(fault.String(), func(t *testing.T) {
			s := faulty.NewHTTP2Server(new(till), faulty.Always(fault))
			defer s.Close()
			_, _, err := postAgain(t.Context(), s.Client(), s.URL, "k1")
			require.Error(t, err)
			require.Len(t, s.Requests(), 1)
		})
	}
}

// The client counts what it writes, its hidden repeats included; the server
// must have read the same number, whatever becomes of the streams.
func TestEveryRequestThatTheClientWroteIsRecorded(t *testing.T) {
	stream := []faulty.Fault{faulty.LoseResponse(), faulty.DropRequest(), faulty.ResetBeforeBody(), faulty.Truncate(2),
		faulty.RSTStream(faulty.Cancel), faulty.RSTStream(faulty.InternalError), faulty.Status(503),
		faulty.Drain(), faulty.GoAway(), faulty.CloseStale()}
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			h := new(till)
			if kind == "h2" {
				stream = stream[:len(stream)-1] // CloseStale takes other streams along
			}
			s := start(h, faulty.Random(5, 0.2, stream...))
			defer s.Close()
			c := s.Client()
			var wrote atomic.Int32
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteHeaders: func() { wrote.Add(1) }})
			var clients sync.WaitGroup
			for range 20 {
				clients.Go(func() {
					for range 10 {
						req, err := http.NewRequestWithContext(ctx, "POST", s.URL, io.NopCloser(strings.NewReader("amount=5")))
						if err != nil {
							t.Error(err)
						}
						do(c, req)
					}
				})
			}
			clients.Wait()
			s.Close()
			require.Len(t, s.Requests(), int(wrote.Load()))
			handled := 0
			for _, r := range s.Requests() {
				if r.Handled {
					handled++
				}
			}
			require.EqualValues(t, h.charges.Load(), handled)
		})
	}
}

func TestAMemoryServerStallsForHoursInNoTime(t *testing.T) {
	for kind, start := range map[string]func(http.Handler, faulty.Script) *faulty.Server{
		"h1": faulty.NewMemoryServer,
		"h2": faulty.NewMemoryHTTP2Server,
	} {
		for _, test := range faults {
			t.Run(kind+"/"+test.fault.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := new(till)
					s := start(h, faulty.InOrder(faulty.Stall(5*time.Hour), test.fault))
					defer s.Close()
					begin := time.Now()
					require.Equal(t, "OK charged", seen(post(s.Client(), s.URL)))
					require.Equal(t, 5*time.Hour, time.Since(begin).Truncate(time.Hour))

					got := seen(post(s.Client(), s.URL))
					switch {
					case kind == "h2":
						require.Equal(t, test.h2, got)
					case test.h1 == "reset": // which a pipe does not know
						require.Contains(t, []string{"reset", "EOF"}, got)
					default:
						require.Equal(t, test.h1, got)
					}
					require.Len(t, s.Requests(), 2)
					require.Equal(t, 1+test.charges, h.charges.Load())
				})
			})
		}
	}
}

func TestNetHTTPGivesUpOnRefusalsAfterAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := faulty.NewMemoryHTTP2Server(nil, faulty.Always(faulty.RSTStream(faulty.RefusedStream)))
		defer s.Close()
		begin := time.Now()
		_, _, err := postAgain(t.Context(), s.Client(), s.URL, "")
		require.ErrorContains(t, err, "REFUSED_STREAM")
		require.Len(t, s.Requests(), 8)
		require.Greater(t, time.Since(begin), time.Minute)
	})
}
