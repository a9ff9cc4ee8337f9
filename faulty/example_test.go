package faulty_test

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/oncehttp/oncehttp/faulty"
)

func ExampleServer() {
	charges := 0
	s := faulty.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		charges++
	}), faulty.InOrder(
		faulty.Status(503, "Retry-After", "1"),
		faulty.LoseResponse(),
	))
	defer s.Close()

	client := s.Client()
	for range 3 {
		resp, err := client.Post(s.URL+"/charges", "application/json", strings.NewReader(`{"amount":5}`))
		if err != nil {
			fmt.Println("lost")
			continue
		}
		resp.Body.Close()
		fmt.Println(resp.StatusCode)
	}
	for _, r := range s.Requests() {
		fmt.Println(r.Method, r.Path, r.Fault, r.Handled)
	}
	fmt.Println("charges:", charges)
	// Output:
	// 503
	// lost
	// 200
	// POST /charges status 503 false
	// POST /charges lose response true
	// POST /charges pass true
	// charges: 2
}

func ExampleTransport() {
	charge := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("charging", r.Header.Get("Idempotency-Key"))
	})
	transport := &faulty.Transport{
		Base:   faulty.Handler(charge),
		Script: faulty.InOrder(faulty.LoseResponse()),
	}
	req, _ := http.NewRequest("POST", "https://pay.example/charges", strings.NewReader("amount=5"))
	req.Header.Set("Idempotency-Key", "order-1042")
	_, err := transport.RoundTrip(req)
	fmt.Println("the client sees:", err)
	fmt.Println("sends:", len(transport.Requests()))
	// Output:
	// charging order-1042
	// the client sees: EOF
	// sends: 1
}
