package faulty_test

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

// A GOAWAY promises that the streams above its last were not processed. The
// client believes it and sends them again: if the promise were broken, a
// request would be charged twice.
func TestNoStreamThatAGoAwayDeniesIsHandled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // net/http waits for seconds between its repeats
		h := new(till)
		s := faulty.NewMemoryHTTP2Server(h, nil)
		defer s.Close()
		c := s.Client()
		require.Equal(t, "OK charged", seen(post(c, s.URL))) // one connection for all
		s.SetScript(faulty.Random(3, 0.05, faulty.GoAway()))
		var clients sync.WaitGroup
		for range 200 {
			clients.Go(func() {
				if got := seen(postAgain(t.Context(), c, s.URL, "")); got != "OK charged" {
					t.Error(got)
				}
			})
		}
		clients.Wait()
		s.Close()
		require.EqualValues(t, 201, h.charges.Load())
		handled, struck := 0, 0
		for _, r := range s.Requests() {
			if r.Handled {
				handled++
			} else {
				require.Equal(t, faulty.GoAway(), r.Fault)
				struck++
			}
		}
		require.Equal(t, 201, handled)
		require.NotZero(t, struck)
	})
}

func TestAGoAwayNamesALaterStreamThatIsAlreadyHandled(t *testing.T) {
	var charges atomic.Int32
	slow, resent := make(chan struct{}), make(chan struct{})
	s := faulty.NewHTTP2Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if charges.Add(1); r.URL.Path == "/slow" {
			close(slow)
			<-resent
		}
		io.WriteString(w, "charged")
	}), nil)
	defer s.Close()
	c := s.Client()
	require.Equal(t, "OK charged", seen(post(c, s.URL)))

	arrived := make(chan struct{})
	s.SetScript(func(n int, r *http.Request) faulty.Fault {
		switch n {
		case 1:
			close(arrived)
			<-slow
			return faulty.GoAway()
		case 3:
			close(resent)
		}
		return faulty.Pass()
	})
	got := make(chan string)
	go func() { got <- seen(postAgain(t.Context(), c, s.URL, "")) }()
	<-arrived
	go func() { got <- seen(postAgain(t.Context(), c, s.URL+"/slow", "")) }()
	require.Equal(t, "OK charged", <-got)
	require.Equal(t, "OK charged", <-got)

	sent := s.Requests()
	require.Len(t, sent, 4)
	require.Equal(t, sent[1].RemoteAddr, sent[2].RemoteAddr)
	require.NotEqual(t, sent[2].RemoteAddr, sent[3].RemoteAddr, "the connection took no more")
	require.Equal(t, faulty.GoAway(), sent[1].Fault)
	require.Equal(t, "/slow", sent[2].Path)
	require.EqualValues(t, 3, charges.Load())
}

func TestALaterStreamSharesTheGoAway(t *testing.T) {
	h := new(till)
	s := faulty.NewHTTP2Server(h, nil)
	defer s.Close()
	c := s.Client()
	require.Equal(t, "OK charged", seen(post(c, s.URL)))

	var arrived [5]chan struct{}
	for n := range arrived {
		arrived[n] = make(chan struct{})
	}
	s.SetScript(func(n int, r *http.Request) faulty.Fault {
		close(arrived[n])
		switch n {
		case 1:
			<-arrived[2]
			return faulty.GoAway()
		case 2:
			<-arrived[3] // both have been sent again
			<-arrived[4]
		}
		return faulty.Pass()
	})
	got := make(chan string)
	go func() { got <- seen(postAgain(t.Context(), c, s.URL, "")) }()
	<-arrived[1]
	go func() { got <- seen(postAgain(t.Context(), c, s.URL, "")) }()
	require.Equal(t, "OK charged", <-got)
	require.Equal(t, "OK charged", <-got)
	s.Close()

	sent := s.Requests()
	require.Len(t, sent, 5)
	require.Equal(t, faulty.GoAway(), sent[1].Fault)
	require.Equal(t, faulty.GoAway(), sent[2].Fault)
	require.False(t, sent[2].Handled)
	require.EqualValues(t, 3, h.charges.Load())
}

// What the client had sent before it knew is recorded, and stays unhandled.
func TestALaterStreamIsLostWithItsConnection(t *testing.T) {
	for _, f := range []faulty.Fault{faulty.DropConn(), faulty.CloseStale(), faulty.DropConn().AfterHandler()} {
		t.Run(f.String(), func(t *testing.T) {
			h := new(till)
			s := faulty.NewHTTP2Server(h, nil)
			defer s.Close()
			c := s.Client()
			require.Equal(t, "OK charged", seen(post(c, s.URL)))

			arrived, both, broken := make(chan struct{}), make(chan struct{}), make(chan struct{})
			s.SetScript(func(n int, r *http.Request) faulty.Fault {
				if n == 1 {
					close(arrived)
					<-both
					return f
				}
				close(both)
				<-broken
				return faulty.Pass()
			})
			got := make(chan string)
			go func() { got <- seen(post(c, s.URL)) }()
			<-arrived
			go func() { got <- seen(post(c, s.URL)) }()
			require.Equal(t, "unexpected EOF", <-got)
			require.Equal(t, "unexpected EOF", <-got)
			close(broken)
			s.Close()

			sent := s.Requests()
			require.Len(t, sent, 3)
			require.Equal(t, f, sent[1].Fault)
			require.Equal(t, faulty.DropConn(), sent[2].Fault)
			require.False(t, sent[2].Handled)
		})
	}
}

// A dropped connection takes other streams' answers with it, but handlers
// and records agree.
func TestRecordsAgreeWhenStreamsShareABreakingConnection(t *testing.T) {
	h := new(till)
	s := faulty.NewHTTP2Server(h, faulty.Random(5, 0.1, faulty.DropConn(), faulty.DropConn().AfterHandler(),
		faulty.LoseResponse(), faulty.RSTStream(faulty.Cancel), faulty.Drain(), faulty.GoAway().AfterHandler()))
	defer s.Close()
	c := s.Client()
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() { post(c, s.URL) })
	}
	clients.Wait()
	s.Close()
	handled := 0
	for _, r := range s.Requests() {
		if r.Handled {
			handled++
		}
	}
	require.EqualValues(t, h.charges.Load(), handled)
}
