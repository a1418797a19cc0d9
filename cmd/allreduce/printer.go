package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// runPrinter shows a run to people: devices, a row per size as it is done, memory and verdict. Where JSON is asked for
// only the progress bar is left; that appears on a terminal only.
type runPrinter struct {
	streams
	job   *runJob
	text  bool
	noted int // warnings that begin has printed
	bar   *progressbar.ProgressBar
}

func newRunPrinter(s streams, text bool, job *runJob) *runPrinter {
	p := &runPrinter{streams: s, job: job, text: text}
	if file, ok := s.err.(*os.File); ok && !silent(job.rank) && term.IsTerminal(int(file.Fd())) {
		launches := 1
		if job.graph {
			launches = replays + 1
		}
		p.bar = progressbar.NewOptions(len(job.bytes)*job.iters*launches, progressbar.OptionSetWriter(file),
			progressbar.OptionSetDescription("reducing"), progressbar.OptionClearOnFinish(), progressbar.OptionShowCount())
	}
	return p
}

func (p *runPrinter) tick(iterations int) {
	if p.bar != nil {
		_ = p.bar.Add(iterations)
	}
}

// clear takes the bar away before a line of text; the next tick draws it again.
func (p *runPrinter) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

func (p *runPrinter) printf(format string, args ...any) {
	if p.text {
		fmt.Fprintf(p.out, format, args...)
	}
}

const rowFormat = "%12s %12s  %-11s %-5s %12s %10s %10s  %-9s  %-5s %8s  %s\n"

// begin prints what is known before the first reduction.
func (p *runPrinter) begin(r *runReport) {
	p.clear()
	mode, place, data := "eager", "out of place", fmt.Sprintf("seed %d", r.Seed)
	if r.Graph {
		mode = "one graph"
	}
	if r.InPlace {
		place = "in place"
	}
	if p.job.arrays != nil {
		data = "inputs from files"
	}
	p.printf("%s on %s devices: %s of %s, %s, %s, %s, %s\n", counted(r.Ranks, "rank"), r.Backend, r.Op, p.job.typ, place, mode,
		counted(r.Iters, "iteration"), data)
	if r.Processes > 1 {
		p.printf("one process per rank: %d\n", r.Processes)
	}
	if len(r.Absent) > 0 {
		p.printf("absent (adds nothing): rank %s\n", joinInts(r.Absent))
	}
	for _, d := range r.Devices {
		p.printf("device %d (rank %s): %s, %s, %s%s%s\n", d.Index, joinInts(d.Ranks), d.Name, d.BusID, d.UUID, linkWords(d), peerWords(d))
	}
	for _, w := range r.Warnings {
		p.printf("note: %s\n", w)
	}
	p.noted = len(r.Warnings)
	if r.Simulated {
		p.printf("SIMULATED: the times below are those of a model of PCIe links, not measured on any hardware\n")
		if r.Processes > 1 {
			p.printf("Each process simulates its own device: what it waits for another one is not in them\n")
		}
	}
}

func linkWords(d runDevice) string {
	if d.PCIeGenMax == 0 {
		return ""
	}
	return fmt.Sprintf(", PCIe %d x%d at most", d.PCIeGenMax, d.PCIeWidthMax)
}

// peerWords says what the driver says of peer access.
func peerWords(d runDevice) string {
	var can []int
	for _, peer := range d.Peers {
		if peer.CanAccess {
			can = append(can, peer.Index)
		}
	}
	switch {
	case len(d.Peers) == 0:
		return ""
	case len(can) == 0:
		return ", no peer access"
	}
	return ", the driver grants peer access to " + joinInts(can)
}

// row prints one size.
func (p *runPrinter) row(r *runReport, result runResult) {
	p.clear()
	if len(r.Results) == 1 {
		p.printf("\n")
		p.printf(rowFormat, "bytes", "count", "path", "wire", "time us", "algbw GB/s", "busbw GB/s", "clock", "equal", "wrong", "reason")
	}
	clock, equal := "device", "yes"
	if r.Simulated {
		clock = "simulated"
	}
	if !result.RanksEqual {
		equal = "NO"
	}
	p.printf(rowFormat, fmt.Sprint(result.Bytes), fmt.Sprint(result.Count), result.Path, result.Wire,
		fmt.Sprintf("%.2f", result.TimeUs), fmt.Sprintf("%.2f", result.AlgbwGBs), fmt.Sprintf("%.2f", result.BusbwGBs), clock,
		equal, fmt.Sprint(result.Wrong), result.Reason)
}

// finish prints what is known after the last reduction. A failure is the caller's to print.
func (p *runPrinter) finish(r *runReport) {
	if p.bar != nil {
		_ = p.bar.Exit()
		p.clear()
	}
	if len(r.Results) == 0 {
		return // it failed before anything was worth a word
	}
	p.printf("\nmemory the library holds:\n")
	for _, m := range r.Memory {
		p.printf("  rank %d on device %d, %-11s  device %8s  pinned %8s\n", m.Rank, m.Device, m.Path, bytesWords(m.OnGPU), bytesWords(m.Pinned))
	}
	news := r.Warnings[p.noted:]
	if len(news) > 0 {
		p.printf("\n")
	}
	for _, w := range news {
		p.printf("warning: %s\n", w)
	}
	if r.Error != "" {
		return
	}
	verdict := "ok: on every rank the same bits, and those of the CPU reference"
	if !r.OK {
		verdict = "FINDING: ranks differ or elements are wrong, see the columns equal and wrong"
	}
	if p.job.out != "" && r.OK {
		verdict += "; written to " + p.job.out
	}
	p.printf("\n%s\n", verdict)
}

// bytesWords is a size for people, to a tenth.
func bytesWords(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	unit, value := 0, float64(n)
	for value >= 1024 && unit < 3 {
		value /= 1024
		unit++
	}
	return strings.Replace(fmt.Sprintf("%.1f %ciB", value, " KMG"[unit]), ".0 ", " ", 1)
}

func joinInts(list []int) string {
	words := make([]string, len(list))
	for i, n := range list {
		words[i] = fmt.Sprint(n)
	}
	return strings.Join(words, ", ")
}
