package faulty

import "net/http"

// A Script decides the fault of the n-th request, counted from 1. It may
// read r's method, URL and header, not its body. It is called once per
// request, from several goroutines at once where requests overlap; a nil
// Script never faults.
type Script func(n int, r *http.Request) Fault

// InOrder gives the first requests these faults, one each, and none to
// those after them.
func InOrder(faults ...Fault) Script {
	return func(n int, _ *http.Request) Fault {
		if n > len(faults) {
			return Pass()
		}
		return faults[n-1]
	}
}

// Always gives every request the same fault.
func Always(f Fault) Script {
	return func(int, *http.Request) Fault { return f }
}

// Random gives a request one of the faults with probability p, all equally
// likely; repeat one to make it likelier. Request n's fault is a function
// of seed and n alone, so the faults of n requests are the same in every
// run, however goroutines are scheduled.
func Random(seed uint64, p float64, faults ...Fault) Script {
	return func(n int, _ *http.Request) Fault {
		h := mix(mix(seed) + uint64(n))
		if len(faults) == 0 || float64(h>>11)/(1<<53) >= p {
			return Pass()
		}
		return faults[mix(h)%uint64(len(faults))]
	}
}

// mix is the finaliser of SplitMix64: it turns a counter into noise.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
