package faulty_test

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

func TestLongHeadersTrailersAndBodiesPassTheProxy(t *testing.T) {
	s := faulty.NewHTTP2Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("X-Long", r.Header.Get("X-Long"))
		n, err := io.Copy(w, r.Body)
		w.Header().Set("X-Sum", fmt.Sprintf("%d %v %s", n, err, r.Trailer.Get("X-Trailer")))
	}), nil)
	defer s.Close()
	c := s.Client()

	long := strings.Repeat("long ", 20_000) // several CONTINUATION frames, each way
	payload := bytes.Repeat([]byte("0123456789"), 150_000)
	var clients sync.WaitGroup
	for range 3 {
		clients.Go(func() {
			for range 2 { // the later ones use what HPACK has learnt from the first
				req, err := http.NewRequest("POST", s.URL, io.MultiReader(bytes.NewReader(payload)))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Long", long)
				req.Trailer = http.Header{"X-Trailer": {"end"}}
				resp, err := c.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				all, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || !bytes.Equal(payload, all) || resp.Header.Get("X-Long") != long ||
					resp.Trailer.Get("X-Sum") != "1500000 <nil> end" {
					t.Error(err, len(all), len(resp.Header.Get("X-Long")), resp.Trailer)
				}
			}
		})
	}
	clients.Wait()
	for _, r := range s.Requests() {
		require.Len(t, r.Body, 1<<20, "no more is kept")
		require.EqualValues(t, len(payload), r.BodySize)
		require.NotContains(t, r.Header, "Faulty-Stream")
	}
}

func TestAHandlerBehindTheProxySeesTheClient(t *testing.T) {
	s := faulty.NewHTTP2Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.RemoteAddr, " ", r.TLS != nil && r.TLS.NegotiatedProtocol == "h2", " ", r.Header["Faulty-Stream"])
	}), nil)
	defer s.Close()
	require.Equal(t, "OK "+"%s true []", strings.Replace(seen(post(s.Client(), s.URL)), s.Requests()[0].RemoteAddr, "%s", 1))
}

func TestAnAbortedStreamLeavesTheConnectionUsable(t *testing.T) {
	// Header blocks of refused requests still reach the decoder: the later
	// requests, which refer to what they taught it, are understood.
	s := faulty.NewHTTP2Server(new(till), faulty.InOrder(
		faulty.RSTStream(faulty.RefusedStream), faulty.RSTStream(faulty.Cancel), faulty.LoseResponse()))
	defer s.Close()
	c := s.Client()
	for _, want := range []string{"REFUSED_STREAM", "CANCEL", "INTERNAL_ERROR", "OK charged"} {
		require.Equal(t, want, seen(post(c, s.URL)))
	}
	for _, r := range s.Requests() {
		require.Equal(t, s.Requests()[0].RemoteAddr, r.RemoteAddr)
		require.Equal(t, "k1", r.Header.Get("Idempotency-Key"))
	}
}

func TestABodyStillOnTheWayMeetsTheFault(t *testing.T) {
	for kind, start := range kinds {
		for _, f := range []faulty.Fault{faulty.ResetBeforeBody(), faulty.LoseRequest(), faulty.RSTStream(faulty.EnhanceYourCalm)} {
			t.Run(kind+"/"+f.String(), func(t *testing.T) {
				s := start(new(till), faulty.InOrder(f))
				defer s.Close()
				c := s.Client()
				_, err := c.Post(s.URL, "", io.LimitReader(zeros{}, 5<<20))
				require.Error(t, err)
				require.Len(t, s.Requests(), 1)
				require.Equal(t, "OK charged", seen(post(c, s.URL)))
			})
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestAClientThatSpeaksNoHTTP2IsHungUpOn(t *testing.T) {
	s := faulty.NewHTTP2Server(nil, nil)
	defer s.Close()
	addr := strings.TrimPrefix(s.URL, "https://")
	for _, test := range []struct{ protocol, bytes string }{
		{"h2", "GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n"},
		{"h2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 100)},
		{"", "anything"},
	} {
		config := s.Transport().TLSClientConfig.Clone()
		if test.protocol != "" {
			config.NextProtos = []string{test.protocol}
		}
		c, err := tls.Dial("tcp", addr, config)
		require.NoError(t, err)
		_, err = c.Write([]byte(test.bytes))
		require.NoError(t, err)
		c.CloseWrite() // fails if the server was faster
		c.NetConn().(interface{ CloseWrite() error }).CloseWrite()
		_, _ = io.ReadAll(c) // ends
		c.Close()
	}
	s.Close()
	require.Empty(t, s.Requests())
}
