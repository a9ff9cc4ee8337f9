package faulty_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp/faulty"
)

func TestHandlerSeesWhatAServerWouldRead(t *testing.T) {
	type secret struct{}
	echo := func(w http.ResponseWriter, r *http.Request) {
		all, err := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s %v %v %v", r.Method, r.RequestURI, r.Host, r.Header.Get("Idempotency-Key"),
			string(all), err, r.Context().Value(secret{}))
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			s := start(http.HandlerFunc(echo), nil)
			defer s.Close()
			for _, base := range []http.RoundTripper{s.Transport(), faulty.Handler(http.HandlerFunc(echo))} {
				for _, body := range []io.Reader{nil, http.NoBody, strings.NewReader("x"), io.NopCloser(strings.NewReader("x"))} {
					ctx := context.WithValue(t.Context(), secret{}, "hidden")
					req, err := http.NewRequestWithContext(ctx, "", s.URL+"/a?b=c#d", body)
					require.NoError(t, err)
					req.Header["idempotency-key"] = []string{"k"}
					status, got, err := do(&http.Client{Transport: base}, req)
					require.NoError(t, err)
					require.Equal(t, 200, status)
					sent := ""
					if body != nil && body != http.NoBody {
						sent = "x"
					}
					require.Equal(t, fmt.Sprintf("GET /a?b=c %s k %s <nil> <nil>", strings.TrimPrefix(strings.TrimPrefix(s.URL, "http://"), "https://"), sent), got)
				}
				if c, ok := base.(*http.Transport); ok {
					c.CloseIdleConnections()
				}
			}
		})
	}
}

func TestHandlersAnswerIsAResponseLikeAServers(t *testing.T) {
	serve := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-A", "1")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusCreated)
		w.Header().Set("X-B", "too late")
		io.WriteString(w, "<html>")
		w.(http.Flusher).Flush()
	}
	s := faulty.NewServer(http.HandlerFunc(serve), nil)
	defer s.Close()
	for _, base := range []http.RoundTripper{s.Transport(), faulty.Handler(http.HandlerFunc(serve))} {
		resp, err := (&http.Client{Transport: base}).Get(s.URL)
		require.NoError(t, err)
		all, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, "<html>", string(all))
		require.Equal(t, "201 Created", resp.Status)
		require.Equal(t, "1", resp.Header.Get("X-A"))
		require.Empty(t, resp.Header.Get("X-B"))
		require.Equal(t, "text/html; charset=utf-8", resp.Header.Get("Content-Type"))
		require.NotNil(t, resp.Request)
	}
}

func TestHandlerReturnsWhenTheClientGivesUpAndCancelsTheHandler(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	base := faulty.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
		close(ended)
	}))
	req, err := http.NewRequestWithContext(ctx, "GET", "http://shop.example/", nil)
	require.NoError(t, err)
	_, err = base.RoundTrip(req)
	require.ErrorIs(t, err, context.Canceled)
	<-ended
	_, err = base.RoundTrip(req)
	require.ErrorIs(t, err, context.Canceled)
}

func TestAHandlersPanicIsAnErrorOfTheClient(t *testing.T) {
	for _, test := range []struct {
		value any
		text  string
	}{
		{http.ErrAbortHandler, "EOF"},
		{"boom", "faulty: the handler panicked: boom"},
	} {
		base := faulty.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(test.value) }))
		req, err := http.NewRequest("GET", "http://shop.example/", nil)
		require.NoError(t, err)
		_, err = base.RoundTrip(req)
		require.EqualError(t, err, test.text)
	}
}
