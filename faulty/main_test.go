package faulty_test

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/oncehttp/oncehttp/faulty"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// till is a handler that counts its charges and answers "charged".
type till struct{ charges atomic.Int32 }

func (h *till) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	h.charges.Add(1)
	io.WriteString(w, "charged")
}

// kinds are the three servers.
var kinds = map[string]func(http.Handler, faulty.Script) *faulty.Server{
	"h1":    faulty.NewServer,
	"h1tls": faulty.NewTLSServer,
	"h2":    faulty.NewHTTP2Server,
}

// post sends one POST whose body net/http cannot rewind: it is sent once.
func post(c *http.Client, url string) (status int, body string, err error) {
	req, err := http.NewRequest("POST", url+"/charges?order=1", io.NopCloser(strings.NewReader("amount=5")))
	if err != nil {
		return 0, "", err
	}
	req.Header["idempotency-key"] = []string{"k1"} // as net/http does not know it
	return do(c, req)
}

func do(c *http.Client, req *http.Request) (status int, body string, err error) {
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(all), err
}
