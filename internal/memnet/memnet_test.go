package memnet_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/oncehttp/oncehttp/internal/memnet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHoursOfRetryAfterPassInNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := memnet.Listen()
		opens := time.Now().Add(5 * time.Hour)
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if time.Now().Before(opens) {
				w.Header().Set("Retry-After", "3600")
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		})}
		go srv.Serve(l)
		tr := &http.Transport{DialContext: l.DialContext}
		defer srv.Close()
		defer tr.CloseIdleConnections()

		sends, start := 0, time.Now()
		for {
			resp, err := (&http.Client{Transport: tr}).Get("http://shop.example/")
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			sends++
			if resp.StatusCode == http.StatusOK {
				break
			}
			wait, err := time.ParseDuration(resp.Header.Get("Retry-After") + "s")
			require.NoError(t, err)
			<-time.After(wait) // the bubble's clock jumps an hour
		}
		require.Equal(t, 6, sends)
		require.Equal(t, 5*time.Hour, time.Since(start))
	})
}

func TestDeadlinesWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := pair(t)
		start := time.Now()
		require.NoError(t, client.SetReadDeadline(start.Add(time.Hour)))
		_, err := client.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, time.Hour, time.Since(start))

		require.NoError(t, server.SetWriteDeadline(time.Now().Add(time.Hour)))
		_, err = server.Write([]byte("x")) // nobody reads
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, 2*time.Hour, time.Since(start))
	})
}

func TestClosingTheListenerFailsPendingDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := memnet.Listen()
		failed := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := l.DialContext(t.Context(), "tcp", "shop.example:443")
				failed <- err
			}()
		}
		synctest.Wait() // both wait for an Accept
		require.Empty(t, failed)
		require.NoError(t, l.Close())
		require.NoError(t, l.Close())

		for range 2 {
			requireDialError(t, <-failed, syscall.ECONNREFUSED)
		}
		_, err := l.DialContext(t.Context(), "tcp", "shop.example:443")
		requireDialError(t, err, syscall.ECONNREFUSED)
		_, err = l.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
	})
}

func TestADialEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := memnet.Listen()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := l.DialContext(ctx, "tcp", "shop.example:443")
		requireDialError(t, err, context.DeadlineExceeded)
		var timeout net.Error
		require.ErrorAs(t, err, &timeout)
		require.True(t, timeout.Timeout())
	})
}

func TestAcceptedConnectionsOutliveTheListenerAndTellClientsApart(t *testing.T) {
	client, server := pair(t)
	go func() {
		client.Write([]byte("hello"))
		client.Close()
	}()
	all, err := io.ReadAll(server)
	require.NoError(t, err)
	require.Equal(t, "hello", string(all))
	require.Equal(t, client.LocalAddr().String(), server.RemoteAddr().String())
	require.Equal(t, "listener", client.RemoteAddr().String())
	require.Equal(t, "memnet", server.LocalAddr().Network())
}

// pair returns the two ends of a connection whose listener is closed.
func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l := memnet.Listen()
	dialed := make(chan net.Conn, 1)
	go func() {
		c, err := l.DialContext(context.Background(), "tcp", "anywhere:80")
		if err != nil {
			t.Error(err)
		}
		dialed <- c
	}()
	server, err := l.Accept()
	require.NoError(t, err)
	client = <-dialed
	require.NoError(t, l.Close())
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func requireDialError(t *testing.T, err, cause error) {
	t.Helper()
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Equal(t, "dial", op.Op)
	require.ErrorIs(t, err, cause)
}
