// Command checkout plays what goes wrong between a shop and its payments
// provider, on real sockets, to a plain retry loop and to oncehttp, and then
// looks into the provider's ledger.
//
// pay.go is the code to copy.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	if status, ok := asShop(context.Background()); ok {
		os.Exit(status)
	}
	os.Exit(checkout(context.Background(), os.Stdout, os.Args[1:]))
}

// checkout returns the exit status: 1 if oncehttp charged an order twice or
// told what is not true, 2 for flags that it does not know.
func checkout(ctx context.Context, out io.Writer, args []string) int {
	flags := flag.NewFlagSet("checkout", flag.ContinueOnError)
	flags.SetOutput(out)
	verbose := flags.Bool("v", false, "show every delivery")
	plant := flags.Bool("plant", false, "plant a bug, a fresh key for every attempt: the audit must find it")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	details := io.Discard
	if *verbose {
		details = out
	}

	fmt.Fprint(out, "Fourteen scenes on 127.0.0.1, a few seconds. In the last four the shop is a process that is killed and started again.\n\n")
	rows := playAll(ctx, details, *plant)
	printTable(out, rows)
	printNotes(out, rows)
	printSummary(out, rows)
	for _, r := range rows {
		if len(r.wrong) > 0 {
			return 1
		}
	}
	return 0
}

func playAll(ctx context.Context, details io.Writer, plant bool) []row {
	var rows []row
	for i, s := range scenes() {
		fmt.Fprintf(details, "Scene %d: %s\n", i+1, s.name)
		r := row{n: i + 1, name: s.name, plain: s.playPlain(ctx), once: s.playOnce(ctx, s.policy, plant)}
		r.plain.printLog(details, "plain loop")
		r.once.printLog(details, "oncehttp")
		r.wrong = r.once.audit()
		if s.note != nil {
			r.notes = append(r.notes, s.note(r.plain, r.once))
		}
		for _, other := range s.others {
			o := s.playOnce(ctx, other.policy, plant)
			o.printLog(details, "oncehttp "+other.name)
			r.notes = append(r.notes, fmt.Sprintf("%s: %d sends, %s", other.name, o.sends(), o.tells(outcomeWord)))
			r.wrong = append(r.wrong, o.audit()...)
		}
		fmt.Fprintln(details)
		rows = append(rows, r)
	}
	return rows
}
