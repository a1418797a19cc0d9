package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"gpu.example/allreduce/internal/atomicfile"
	"gpu.example/allreduce/internal/precision"
)

// precisionJob is `allreduce perf --precision`, as asked for. newPrecisionJob has the defaults.
type precisionJob struct {
	backend  string
	ranks    []int // of the error rows; the transformer has always two
	elements int
	tokens   int
	seed     uint64
	asJSON   bool
	jsonFile string
}

const (
	maxElements = 1 << 26
	maxTokens   = 1 << 16
)

func newPrecisionJob() *precisionJob {
	return &precisionJob{backend: "auto", ranks: []int{2, 4}, elements: precision.JudgedElements, tokens: 512, seed: 1}
}

// register adds the flags that --precision alone has; backend, ranks, seed and the JSON flags are perf's.
func (j *precisionJob) register(flags *pflag.FlagSet) {
	flags.IntVar(&j.elements, "elements", j.elements, "with --precision: `number` of elements of each input")
	flags.IntVar(&j.tokens, "tokens", j.tokens, "with --precision: `number` of token positions whose logits are compared")
}

func (j *precisionJob) check() error {
	for _, n := range j.ranks {
		if n < 2 || n > maxRanks {
			return fmt.Errorf("%d ranks are not allowed with --precision; allowed: 2 to %d", n, maxRanks)
		}
	}
	if j.elements < 1 || j.elements > maxElements {
		return fmt.Errorf("--elements %d is not allowed; allowed: 1 to %d", j.elements, maxElements)
	}
	if j.tokens < 1 || j.tokens > maxTokens {
		return fmt.Errorf("--tokens %d is not allowed; allowed: 1 to %d", j.tokens, maxTokens)
	}
	if j.jsonFile != "" {
		return atomicfile.Check(j.jsonFile)
	}
	return nil
}

// runPrecision measures and prints, also where it could not be finished. It ends with errFinding for a finding.
func runPrecision(ctx context.Context, s streams, j *precisionJob) error {
	if err := j.check(); err != nil {
		return err
	}
	options := precision.Options{Ranks: j.ranks, Elements: j.elements, Tokens: j.tokens, Shape: precision.DefaultShape, Seed: j.seed}
	report := precision.NewReport(j.backend, options)
	driver, note, err := pickBackend(j.backend, 2, nil)
	if note != "" {
		report.Warnings = append(report.Warnings, note)
	}
	if err == nil {
		options.Driver = driver
		var done func()
		options.Step, done = precisionProgress(s)
		err = report.Run(ctx, options)
		done()
	}
	if err != nil {
		report.Error = oneLine(err)
	}
	if !j.asJSON {
		fmt.Fprint(s.out, precisionText(report))
	}
	return deliver(s, j.asJSON, j.jsonFile, report, report.OK, err)
}

// precisionProgress shows what is being measured, on a terminal only.
func precisionProgress(s streams) (step func(string), done func()) {
	file, ok := s.err.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return nil, func() {}
	}
	bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(file), progressbar.OptionClearOnFinish())
	return func(what string) {
		bar.Describe(what)
		_ = bar.Add(1)
	}, func() { _ = bar.Finish() }
}

const (
	errorFormat = "%5s  %-12s  %-4s  %-4s  %-8s  %10s %10s %10s  %10s %10s  %5s  %s\n"
	klFormat    = "%-4s  %-4s  %-8s  %10s  %-10s %10s  %9s  %5s  %s\n"
)

// precisionText is the report for people. A report without rows failed before there was anything to say.
func precisionText(r *precision.Report) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	if len(r.Errors) == 0 {
		return ""
	}
	line("precision of F32 payloads on %s devices, seed %d\n", r.Backend, r.Seed)
	for _, d := range r.Devices {
		line("device %d: %s, %s\n", d.Index, d.Name, d.UUID)
	}
	for _, w := range r.Warnings {
		line("note: %s\n", w)
	}
	line("source measured: reductions that ran here; model: NCCL's sum computed on the CPU\n")

	line("\nerror against float64, %d elements; an ulp is the wire type's at the exact sum\n", r.Elements)
	line(errorFormat, "ranks", "inputs", "wire", "sum", "source", "max", "mean", "RMS", "max ulp", "mean ulp", "wrong", "paths")
	for _, e := range r.Errors {
		line(errorFormat, fmt.Sprint(e.Ranks), e.Distribution, e.Wire, e.By.By, e.Source, figure(e.Max), figure(e.Mean), figure(e.RMS),
			figure(e.MaxULP), figure(e.MeanULP), fmt.Sprint(e.Wrong), strings.Join(e.Paths, " "))
	}
	if len(r.Divergence) > 0 {
		m := r.Model
		line("\nwhat it does to a transformer's logits, against F32 reductions: %d positions, KL divergence in nats\n", r.Tokens)
		line("(2 ranks, %d layers of width %d, %d heads, feed-forward %d, %d tokens; entropy %.2f nats, likeliest token %.0f %%)\n",
			m.Layers, m.Width, m.Heads, m.FFN, m.Vocab, m.Entropy, 100*m.TopProbability)
		line(klFormat, "wire", "sum", "source", "KL mean", "+- error", "KL max", "same top", "wrong", "paths")
		for _, d := range r.Divergence {
			line(klFormat, d.Wire, d.By.By, d.Source, figure(d.Mean), figure(d.StdErr), figure(d.Max), fmt.Sprintf("%.2f %%", 100*d.SameTop),
				fmt.Sprint(d.Wrong), strings.Join(d.Paths, " "))
		}
	}
	line("\n")
	for _, f := range r.Findings {
		line("FINDING: %s\n", f)
	}
	switch {
	case r.Error != "" || !r.OK:
	case r.Elements < precision.JudgedElements:
		line("ok: our sums are bit for bit those of the CPU reference\n")
	default:
		line("ok: our sums are bit for bit those of the CPU reference; mean and RMS error are not above NCCL's on the same wire\n" +
			"(by more than 1 %% where three or more ranks have an F32 wire)\n")
	}
	return b.String()
}

// figure is a number to four digits.
func figure(x float64) string { return fmt.Sprintf("%.4g", x) }
