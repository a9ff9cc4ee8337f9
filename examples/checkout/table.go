package main

import (
	"fmt"
	"io"
	"strings"
)

// A row is one scene, played to both.
type row struct {
	n           int
	name        string
	plain, once run
	notes       []string // what does not fit into the table
	wrong       []string // what the audit of oncehttp found
}

func printTable(out io.Writer, rows []row) {
	const format = "%2v  %-33s %7v   %5v %7v  %-11s   %5v %7v  %-21s %s\n"
	fmt.Fprintf(out, "%-46s   %-26s   %s\n", "", "---- plain retry loop ----", "------------- oncehttp --------------")
	fmt.Fprintf(out, format, "#", "what happens", "orders", "sends", "charges", "tells", "sends", "charges", "tells", "ledger agrees")
	for _, r := range rows {
		agrees := "yes"
		if len(r.wrong) > 0 {
			agrees = "NO"
		}
		fmt.Fprintf(out, format, r.n, r.name, len(r.once.orders()),
			r.plain.sends(), len(r.plain.ledger), r.plain.tells(plainWord),
			r.once.sends(), len(r.once.ledger), r.once.tells(outcomeWord), agrees)
	}
}

func plainWord(t told) string {
	if t.err != nil {
		return "failed"
	}
	return "paid"
}

func outcomeWord(t told) string { return t.payment.Outcome.String() }

// tells sums up what was told: "done, not sent" or "200 unknown".
func (r run) tells(word func(told) string) string {
	var words []string
	count := make(map[string]int)
	for _, t := range r.told {
		w := word(t)
		if count[w] == 0 {
			words = append(words, w)
		}
		count[w]++
	}
	for i, w := range words {
		if count[w] > 1 {
			words[i] = fmt.Sprintf("%d %s", count[w], w)
		}
	}
	return strings.Join(words, ", ")
}

// printNotes writes what the table has no column for.
func printNotes(out io.Writer, rows []row) {
	fmt.Fprintln(out)
	for _, r := range rows {
		for _, note := range r.notes {
			fmt.Fprintf(out, "%2d  %s\n", r.n, note)
		}
	}
}

// printSummary writes what the table comes to.
func printSummary(out io.Writer, rows []row) {
	var orders, plainSends, onceSends, plainExtra, onceExtra, wrong int
	for _, r := range rows {
		orders += len(r.once.orders())
		plainSends += r.plain.sends()
		onceSends += r.once.sends()
		plainExtra += r.plain.tooMany()
		onceExtra += r.once.tooMany()
		wrong += len(r.wrong)
	}
	fmt.Fprintf(out, "\nFor %d orders the plain loop sent %d requests and made %d charges too many; oncehttp sent %d and made %s too many",
		orders, plainSends, plainExtra, onceSends, orNone(onceExtra))
	if wrong == 0 {
		fmt.Fprintln(out, ",\nand the ledger agrees with everything it told.")
		return
	}
	fmt.Fprint(out, ".\n\n")
	for _, r := range rows {
		for _, w := range r.wrong {
			fmt.Fprintf(out, "WRONG: scene %d (%s): %s\n", r.n, r.name, w)
		}
	}
}

func orNone(n int) string {
	if n == 0 {
		return "none"
	}
	return fmt.Sprint(n)
}
