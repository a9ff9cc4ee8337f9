// Package faulty is a test kit for HTTP clients that must survive a bad
// network: a server and a RoundTripper that fail to order, and that count
// what was sent.
//
// A [Script] says which [Fault] befalls which request:
//
//	s := faulty.NewServer(handler, faulty.InOrder(
//		faulty.Status(503, "Retry-After", "1"),
//		faulty.LoseResponse(),
//	)) // the third request and those after it are served
//	defer s.Close()
//	resp, err := s.Client().Post(s.URL+"/charges", "application/json", body)
//	require.Len(t, s.Requests(), 1)
//
// [Server] fails on real connections, over HTTP/1.1, TLS or HTTP/2, down to
// GOAWAY and RST_STREAM; what the client sees is what net/http makes of it,
// its hidden repeats included. In memory ([NewMemoryServer]) it runs inside
// a testing/synctest bubble, where hours of Retry-After pass in no time, and
// so does [Transport] over [Handler]. A Transport makes the same faults without
// sockets, around any RoundTripper, with errors shaped as net/http's.
package faulty
