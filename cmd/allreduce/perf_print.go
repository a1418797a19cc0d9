package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"gpu.example/allreduce"
)

// perfPrinter shows a run to people, in the columns of nccl-tests with ours behind them. Where JSON or benchmark lines are
// asked for, only the progress bar is left; that appears on a terminal only.
type perfPrinter struct {
	streams
	flags   *perfFlags
	job     *perfJob
	text    bool
	noted   int // warnings that were printed
	columns bool
	overlay bool // the head of the overlap table is printed
	bar     *progressbar.ProgressBar
}

func newPerfPrinter(s streams, f *perfFlags, job *perfJob) *perfPrinter {
	p := &perfPrinter{streams: s, flags: f, job: job, text: !f.asJSON && f.format == "text"}
	if file, ok := s.err.(*os.File); ok && !silent(job.rank) && term.IsTerminal(int(file.Fd())) {
		p.bar = progressbar.NewOptions(len(job.Sizes)*len(job.Modes), progressbar.OptionSetWriter(file),
			progressbar.OptionSetDescription("measuring"), progressbar.OptionClearOnFinish(), progressbar.OptionShowCount())
	}
	return p
}

func (p *perfPrinter) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

func (p *perfPrinter) printf(format string, args ...any) {
	if p.text {
		fmt.Fprintf(p.out, format, args...)
	}
}

// status says what is measured next, beyond the rows.
func (p *perfPrinter) status(what string) {
	if p.bar != nil {
		p.bar.ChangeMax(p.bar.GetMax() + 1)
		p.bar.Describe(what)
		_ = p.bar.Add(1)
	}
}

func (p *perfPrinter) notes(r *perfReport, word string) {
	for _, w := range r.Warnings[p.noted:] {
		p.printf("# %s: %s\n", word, w)
	}
	p.noted = len(r.Warnings)
}

// begin prints what is known before the first row.
func (p *perfPrinter) begin(r *perfReport) {
	p.clear()
	p.printf("# allreduce %s perf: %s on %s devices, %s of %s, seed %d, %s\n", r.Version, counted(r.Ranks, "rank"), r.Backend, r.Op,
		datatypeNames[p.job.Type], r.Seed, counted(r.Repeats, "repeat"))
	for _, d := range r.Devices {
		p.printf("# device %d (rank %s): %s, %s%s%s\n", d.Index, joinInts(d.Ranks), d.Name, d.BusID, linkWords(d), peerWords(d))
	}
	if r.Processes > 1 {
		p.printf("# one process per rank: %d; times are those on rank 0's stream\n", r.Processes)
	}
	if r.Driver != "" {
		p.printf("# driver %s\n", r.Driver)
	}
	for _, n := range r.NCCL {
		p.printf("# NCCL %s%s\n", n.Version, inBrackets(n.Library))
	}
	if r.Simulated {
		p.printf("# SIMULATED: the times below are those of a model of PCIe links, not measured on any hardware\n")
	}
	p.notes(r, "note")
}

func inBrackets(text string) string {
	if text == "" {
		return ""
	}
	return " (" + text + ")"
}

// perfFormats are the formats of the columns that every table has, in order.
var perfFormats = [...]string{"%12s", "  %12s", "  %8s", "  %6s", "  %6s", "  %8s", "  %6s", "  %6s", "  %6s", "  %8s", "  %6s", "  %6s", "  %6s",
	"  %8s", " %8s", " %8s", " %8s", "  %-11s", " %-4s", " %-5s", " %5s"}

// row prints one row as it is done.
func (p *perfPrinter) row(row *perfRow) {
	if p.bar != nil {
		_ = p.bar.Add(1)
	}
	p.clear()
	if !p.columns {
		p.columns = true
		p.printf("#\n#%52s  %-32s  %s\n", "", "out-of-place", "in-place")
		p.line("#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong",
			"min", "median", "p90", "p99", "path", "wire", "mode", "iters", "bound", "%", "T(c*)", "%", "nccl", "ratio", "asked")
		p.line("#", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)",
			"(us)", "(us)", "", "", "", "", "(us)", "", "(us)", "", "(us)", "", "")
	}
	in := []string{"N/A", "N/A", "N/A", "N/A"}
	if row.InPlace != nil {
		in = p.place(row.InPlace)
	}
	out := p.place(&row.Ours)
	words := []string{fmt.Sprint(row.Bytes), fmt.Sprint(row.Count), datatypeNames[p.job.Type], row.Op, "-1"}
	words = append(append(words, out...), in...)
	words = append(words, microseconds(row.Ours.Min), microseconds(row.Ours.Median), microseconds(row.Ours.P90), microseconds(row.Ours.P99),
		row.Path, row.Wire, row.Mode, fmt.Sprint(row.Iters), microseconds(row.BoundUs), percent(row.PercentOfBound),
		microseconds(row.ModelUs), percent(row.PercentOfModel))
	if n := row.NCCLDefault; n != nil {
		words = append(words, microseconds(n.Times.Median), fmt.Sprintf("%.2f", row.RatioDefault))
	} else {
		words = append(words, "", "")
	}
	p.line(" ", append(words, row.Asked.String())...)
}

func (p *perfPrinter) place(t *perfTimes) []string {
	wrong := "N/A"
	if p.job.Check {
		wrong = fmt.Sprint(t.Wrong)
	}
	return []string{microseconds(t.Median), fmt.Sprintf("%.2f", t.AlgbwGBs), fmt.Sprintf("%.2f", t.BusbwGBs), wrong}
}

// line prints 28 words; columns of what was not asked for are left out.
func (p *perfPrinter) line(mark string, words ...string) {
	text := mark
	for i, format := range perfFormats {
		text += fmt.Sprintf(format, words[i])
	}
	if p.job.Bound {
		text += fmt.Sprintf(" %8s %5s %8s %5s", words[21], words[22], words[23], words[24])
	}
	if p.job.VsNCCL {
		text += fmt.Sprintf(" %8s %5s", words[25], words[26])
	}
	if len(p.job.Variants) > 1 {
		text += "  " + words[27]
	}
	p.printf("%s\n", strings.TrimRight(text, " "))
}

// microseconds has as many digits as mean something; "" for what was not measured.
func microseconds(us float64) string {
	switch {
	case us <= 0:
		return ""
	case us < 1000:
		return fmt.Sprintf("%.2f", us)
	case us < 10_000:
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

func percent(x float64) string {
	if x <= 0 {
		return ""
	}
	return fmt.Sprintf("%.1f", x)
}

const overlapFormat = "# %-46s %10s %8s %-5s %8s %12s %12s %10s\n"

// overlap prints one row of --overlap.
func (p *perfPrinter) overlap(row overlapRow) {
	p.clear()
	if !p.overlay {
		p.overlay = true
		p.printf("#\n# a row of %d compute kernels that fill an SM with each block, beside reductions without a pause\n", row.Kernels)
		p.printf(overlapFormat, "beside", "payload", "blocks", "wire", "per SM", "alone (us)", "time (us)", "slow-down")
	}
	payload := ""
	if row.Bytes > 0 {
		payload = allreduce.FormatBytes(row.Bytes)
	}
	p.printf(overlapFormat, row.label(), payload, fmt.Sprint(row.Blocks), row.Wire, fmt.Sprint(row.BlocksPerSM),
		fmt.Sprintf("%.1f", row.AloneUs), fmt.Sprintf("%.1f", row.Us), fmt.Sprintf("%.3f", row.Slowdown))
}

// finish prints what is known after the last row. A failure is the caller's to print.
func (p *perfPrinter) finish(r *perfReport) {
	if p.bar != nil {
		_ = p.bar.Exit()
		p.clear()
	}
	if p.flags.format == "bench" && !p.flags.asJSON {
		writeBenchmarks(p.out, r)
		return
	}
	if len(r.Results) == 0 {
		return // it failed before anything was worth a word
	}
	p.childrenRows(r)
	p.comparison(r)
	p.printf("#\n")
	if slices.ContainsFunc(r.Results, func(row perfRow) bool { return row.Capped }) {
		p.printf("# iters: %d for each repeat, fewer where they would take longer than %d ms (-n sets them)\n", defaultIters, r.BudgetMs)
	}
	if t := r.Timeline; t != nil {
		p.printf("# timeline (%s): %s, %s, wire %s, %.1f us, duplex %.0f %%\n", map[bool]string{true: "simulated", false: "traced"}[t.Simulated], bytesWords(t.Bytes), t.Path, t.Wire, t.TotalUs, 100*t.Duplex)
	}
	for _, m := range r.Memory {
		p.printf("# memory of a rank at most, %s: device %s, pinned %s\n", m.Path, bytesWords(m.OnGPU), bytesWords(m.Pinned))
	}
	p.notes(r, "warning")
	if b := r.Baseline; b != nil {
		for _, d := range b.Deviations {
			p.printf("# WORSE: %s %s %s: %s was %g, is %g (%.1f %%)\n", allreduce.FormatBytes(d.Bytes), d.Mode, d.Asked, d.What, d.Was, d.Is, d.Percent)
		}
		p.printf("# compared with %s: %s, %d worse\n", b.File, counted(b.Compared, "row"), b.Worse)
	}
	if r.Error != "" {
		return
	}
	verdict := "OK"
	if !r.right() {
		verdict = "FAILED"
	}
	if !r.Checked {
		verdict = "not checked"
	}
	p.printf("# Out of bounds values : %d %s\n", r.Wrong, verdict)
	p.printf("# Avg bus bandwidth    : %.4g\n", r.AvgBusbw)
}

// childrenRows prints the rows of --overlap that came from other processes.
func (p *perfPrinter) childrenRows(r *perfReport) {
	for _, row := range r.Overlap {
		if row.Beside == "nccl" && (row.Settings != defaultSettings || len(r.NCCL) > 0 && row.Version != r.NCCL[0].Version) {
			p.overlap(row)
		}
	}
}

const comparisonFormat = "# %10s %-5s %-4s %-11s %10s %10s %7s %10s %7s  %s\n"

// comparison prints the rows against NCCL's best.
func (p *perfPrinter) comparison(r *perfReport) {
	if !slices.ContainsFunc(r.Results, func(row perfRow) bool { return row.NCCLBest != nil }) {
		return
	}
	p.printf("#\n# against NCCL: medians of ours and of NCCL's default beside it, the ratio to the best of its settings, and which that is\n")
	p.printf(comparisonFormat, "size", "mode", "wire", "path", "ours (us)", "nccl (us)", "ratio", "best (us)", "ratio", "best setting")
	for i := range r.Results {
		row := &r.Results[i]
		if row.NCCLBest == nil {
			continue
		}
		byDefault, ratio := "", ""
		if row.NCCLDefault != nil {
			byDefault, ratio = microseconds(row.NCCLDefault.Times.Median), fmt.Sprintf("%.2f", row.RatioDefault)
		}
		setting := row.NCCLBest.Version + " " + row.NCCLBest.Settings
		if len(p.job.Variants) > 1 {
			setting += " [" + row.Asked.String() + "]"
		}
		p.printf(comparisonFormat, allreduce.FormatBytes(row.Bytes), row.Mode, row.Wire, row.Path, microseconds(row.Ours.Median), byDefault, ratio,
			microseconds(row.NCCLBest.Times.Median), fmt.Sprintf("%.2f", row.Ratio), setting)
	}
}
