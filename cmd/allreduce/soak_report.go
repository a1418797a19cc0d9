package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// soakReport is the JSON of `allreduce soak`.
type soakReport struct {
	Backend     string        `json:"backend"`
	Simulated   bool          `json:"simulated"`
	Graph       bool          `json:"graph"`
	Seed        uint64        `json:"seed"`
	Schedule    string        `json:"schedule"` // of emulated devices; "" on GPUs
	Ranks       int           `json:"ranks"`
	Processes   int           `json:"processes"`
	Devices     []runDevice   `json:"devices"`
	Duration    float64       `json:"duration_seconds"` // asked for
	Seconds     float64       `json:"seconds"`
	Calls       int64         `json:"calls"` // reductions; each of a replay counts
	Bytes       int64         `json:"bytes"` // payload per rank of those
	Replays     int64         `json:"replays"`
	Graphs      int64         `json:"graphs"` // captured
	Batches     int64         `json:"batches"`
	Mismatches  int64         `json:"mismatches"` // calls whose result is wrong on some rank
	Hazards     int64         `json:"hazards"`    // of the emulated machine's checker
	IdleGaps    int64         `json:"idle_gaps"`
	IdleSeconds float64       `json:"idle_seconds"`
	Results     []*soakRow    `json:"results"`
	Skipped     []soakSkipped `json:"skipped"`
	Finding     *soakFinding  `json:"finding"`
	Also        []string      `json:"also"` // found with the first finding
	Memory      []perfMemory  `json:"memory"`
	Warnings    []string      `json:"warnings"`
	Error       string        `json:"error,omitempty"` // why it could not be finished
	OK          bool          `json:"ok"`

	rows map[soakRowKey]*soakRow
}

type soakRowKey struct {
	path      allreduce.Path
	typ, wire allreduce.Type
}

// soakRow sums up the reductions that took one path with one wire.
type soakRow struct {
	Path       string `json:"path"`
	Type       string `json:"type"`
	Wire       string `json:"wire"`
	Calls      int64  `json:"calls"`
	Replayed   int64  `json:"replayed"` // of those, in replays
	Bytes      int64  `json:"bytes"`
	Mismatches int64  `json:"mismatches"`
	RanksEqual bool   `json:"ranks_equal"`
}

// soakSkipped is a path that cannot be had here.
type soakSkipped struct {
	Path   string `json:"path"`
	Reason string `json:"reason"`
}

// The kinds of findings.
const (
	findingMismatch = "mismatch" // a result is wrong
	findingHazard   = "hazard"   // the emulated machine saw accesses out of order
	findingFailure  = "failure"  // a call or a wait failed
	findingPeer     = "rank"     // the process of another rank found something, which is the text
)

// soakFinding is the first thing that was wrong. A mismatch names the element; call counts reductions from 0.
type soakFinding struct {
	Kind     string `json:"kind"`
	Call     int64  `json:"call"`
	Batch    int64  `json:"batch"`
	Mode     string `json:"mode"` // eager or graph
	Asked    string `json:"asked"`
	Path     string `json:"path"`
	Wire     string `json:"wire"`
	Type     string `json:"type"`
	Op       string `json:"op"`
	Bytes    int64  `json:"bytes"`
	InPlace  bool   `json:"in_place"`
	Rank     int    `json:"rank"`
	Element  int64  `json:"element"`
	Wrong    int64  `json:"wrong"` // elements of this rank's result
	Expected string `json:"expected"`
	Got      string `json:"got"`
	Text     string `json:"text"`
	Report   string `json:"report"` // the emulated machine's
	Seed     uint64 `json:"seed"`
	Schedule string `json:"schedule"`
	Mutate   string `json:"mutate,omitempty"`
	Command  string `json:"command"` // does the same again
}

// describe fills in what was reduced.
func (f *soakFinding) describe(b *burst) {
	f.Mode, f.Asked = modeEager, variant{Wire: b.lane.wire, Path: b.lane.path}.String()
	f.Path, f.Wire, f.Type, f.Op, f.Bytes, f.InPlace = b.route.Path.String(), b.key.wire.String(), b.typ.String(), b.op.String(), b.bytes, b.inPlace
}

// String is the finding in a few lines.
func (f *soakFinding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s in call %d (batch %d)", f.Kind, f.Call, f.Batch)
	if f.Path != "" {
		place := "out of place"
		if f.InPlace {
			place = "in place"
		}
		fmt.Fprintf(&b, ": %s, path %s, wire %s, %s of %d bytes of %s, %s", f.Mode, f.Path, f.Wire, f.Op, f.Bytes, f.Type, place)
	}
	if f.Expected != "" {
		fmt.Fprintf(&b, "; rank %d, element %d: expected %s, got %s (%d wrong)", f.Rank, f.Element, f.Expected, f.Got, f.Wrong)
	}
	for _, text := range []string{f.Text, f.Report} {
		if text != "" {
			fmt.Fprintf(&b, "\n%s", strings.TrimSpace(text))
		}
	}
	return b.String()
}

func newSoakReport(j *soakJob) *soakReport {
	return &soakReport{Backend: j.backend, Graph: j.graph, Seed: j.seed, Ranks: j.ranks, Processes: j.ranks / ranksHere(j.rank, j.ranks), Devices: []runDevice{},
		Duration: j.duration.Seconds(), Results: []*soakRow{}, Skipped: []soakSkipped{}, Also: []string{}, Memory: []perfMemory{},
		Warnings: []string{}, rows: map[soakRowKey]*soakRow{}}
}

// begin fills in what is known before the first reduction.
func (r *soakReport) begin(rig *soakRig) error {
	run := runReport{Devices: []runDevice{}, Warnings: []string{}}
	if err := run.describe(rig.session); err != nil {
		return err
	}
	r.Backend, r.Simulated, r.Devices = run.Backend, run.Simulated, run.Devices
	r.Warnings = append(r.Warnings, run.Warnings...)
	r.Skipped = append(r.Skipped, rig.skipped...)
	if r.Simulated && r.Processes == 1 {
		r.Schedule = device.CurrentMachine().Schedule.String()
	}
	return nil
}

// row is that of a burst's path, type and wire.
func (r *soakReport) row(b *burst) *soakRow {
	key := soakRowKey{b.route.Path, b.typ, b.key.wire}
	row := r.rows[key]
	if row == nil {
		row = &soakRow{Path: b.route.Path.String(), Type: b.typ.String(), Wire: b.key.wire.String(), RanksEqual: true}
		r.rows[key] = row
		r.Results = append(r.Results, row)
	}
	return row
}

func (r *soakReport) countBurst(b *burst) {
	row, bytes := r.row(b), int64(b.n)*b.bytes
	row.Calls, row.Bytes = row.Calls+int64(b.n), row.Bytes+bytes
	r.Calls, r.Bytes = r.Calls+int64(b.n), r.Bytes+bytes
}

func (r *soakReport) countGraph(g *soakGraph, replays int) {
	for i := range g.bursts {
		b := &g.bursts[i]
		row, calls := r.row(b), int64(b.n*replays)
		row.Calls, row.Replayed, row.Bytes = row.Calls+calls, row.Replayed+calls, row.Bytes+calls*b.bytes
	}
	r.Replays += int64(replays)
	r.Calls, r.Bytes = r.Calls+g.calls*int64(replays), r.Bytes+g.bytes*int64(replays)
}

// account fills in what the library holds, and its warnings.
func (r *soakReport) account(rig *soakRig) {
	most := map[allreduce.Path]perfMemory{}
	for _, lane := range rig.lanes {
		stats := lane.comm.Stats()
		for _, rank := range stats.Ranks {
			for p := range rank.DeviceBytes {
				path := allreduce.Path(p)
				most[path] = perfMemory{path.String(), max(most[path].OnGPU, rank.DeviceBytes[p]), max(most[path].Pinned, rank.PinnedBytes[p])}
			}
		}
		for _, w := range stats.Warnings {
			if !slices.Contains(r.Warnings, w) {
				r.Warnings = append(r.Warnings, w)
			}
		}
	}
	for path := range allreduce.Path(len(allreduce.Stats{}.Paths)) {
		if m := most[path]; m.OnGPU > 0 || m.Pinned > 0 {
			r.Memory = append(r.Memory, m)
		}
	}
	slices.SortFunc(r.Results, func(a, b *soakRow) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Type, b.Type), cmp.Compare(a.Wire, b.Wire))
	})
}

// repeatable is the command line without what does not change the calls.
func repeatable(cmd *cobra.Command) []string {
	words := strings.Fields(cmd.CommandPath())
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name != "json" && f.Name != "json-file" && f.Name != "calls" && f.Name != "launch" {
			words = append(words, "--"+f.Name+"="+f.Value.String())
		}
	})
	return words
}

// soakPrinter shows a soak to people. Where JSON is asked for only the progress bar is left; that appears on a terminal
// only.
type soakPrinter struct {
	streams
	text bool
	bar  *progressbar.ProgressBar
}

func newSoakPrinter(s streams, text bool, job *soakJob) *soakPrinter {
	p := &soakPrinter{streams: s, text: text}
	if file, ok := s.err.(*os.File); ok && !silent(job.rank) && term.IsTerminal(int(file.Fd())) {
		p.bar = progressbar.NewOptions64(max(int64(job.duration/time.Second), 1), progressbar.OptionSetWriter(file),
			progressbar.OptionSetDescription("soaking"), progressbar.OptionClearOnFinish(), progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(false), progressbar.OptionThrottle(200*time.Millisecond))
	}
	return p
}

func (p *soakPrinter) printf(format string, args ...any) {
	if p.text {
		fmt.Fprintf(p.out, format, args...)
	}
}

func (p *soakPrinter) tick(elapsed time.Duration, r *soakReport) {
	if p.bar != nil {
		p.bar.Describe(fmt.Sprintf("soaking: %d calls, %d replays, %s", r.Calls, r.Replays, bytesWords(r.Bytes)))
		_ = p.bar.Set64(min(int64(elapsed/time.Second), p.bar.GetMax64()))
	}
}

// begin prints what is known before the first reduction.
func (p *soakPrinter) begin(r *soakReport) {
	order := ""
	switch {
	case r.Processes > 1:
		order = ", one process per rank"
	case r.Simulated:
		order = ", schedule " + r.Schedule
	}
	p.printf("%s on %s devices for %s, seed %d%s\n", counted(r.Ranks, "rank"), r.Backend, time.Duration(r.Duration*float64(time.Second)), r.Seed, order)
	for _, skipped := range r.Skipped {
		p.printf("without path %s: %s\n", skipped.Path, skipped.Reason)
	}
	for _, w := range r.Warnings {
		p.printf("note: %s\n", w)
	}
	if r.Simulated {
		p.printf("SIMULATED: no hardware is tested, only the order of what the library asks of it\n")
	}
}

// finish prints the rest. A failure is the caller's to print.
func (p *soakPrinter) finish(r *soakReport) {
	if p.bar != nil {
		_ = p.bar.Exit()
		_ = p.bar.Clear()
	}
	if len(r.Results) > 0 {
		const row = "%-11s  %-4s  %-4s  %12s  %12s  %12s  %10s\n"
		p.printf("\n"+row, "path", "type", "wire", "calls", "replayed", "bytes", "mismatches")
		for _, s := range r.Results {
			p.printf(row, s.Path, s.Type, s.Wire, fmt.Sprint(s.Calls), fmt.Sprint(s.Replayed), bytesWords(s.Bytes), fmt.Sprint(s.Mismatches))
		}
		p.printf("\n%d calls in %.1f s, %s per rank, %d replays of %d graphs, %d batches, %d idle gaps (%.1f s), %d mismatches, %d hazards\n",
			r.Calls, r.Seconds, bytesWords(r.Bytes), r.Replays, r.Graphs, r.Batches, r.IdleGaps, r.IdleSeconds, r.Mismatches, r.Hazards)
	}
	switch {
	case r.Finding != nil:
		p.printf("\nFINDING: %s\n", r.Finding)
		for _, also := range r.Also {
			p.printf("also: %s\n", also)
		}
		p.printf("again: %s\n", r.Finding.Command)
	case r.Error == "":
		p.printf("\nok: every result was the CPU reference's on every rank\n")
	}
}
