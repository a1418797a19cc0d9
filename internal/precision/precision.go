// Package precision measures what a wire type costs: the error of a reduction against float64, for inputs of several
// distributions, and what that error does to the logits of a small synthetic transformer split over two ranks. NCCL
// stands beside us: measured where there is one and real GPUs, else by a model of its sum. docs/precision.md explains
// the measurements and holds the figures.
package precision

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// JudgedElements is how many elements a comparison with NCCL needs to mean something: with fewer it is shown, not judged.
const JudgedElements = 1_000_000

// Options say what Run does. The zero value of a number is not a default: every field must be set.
type Options struct {
	Driver   device.Driver
	Ranks    []int  // numbers of ranks of the error rows; the transformer has always two
	Elements int    // of each input
	Tokens   int    // positions whose logits are compared
	Shape    Shape  // of the transformer
	Seed     uint64 // of inputs, weights and tokens
	// Step is called with what is done next; nil: nobody listens.
	Step func(what string)

	emulatedNCCL bool // tests: the emulated NCCL in the model's place
}

// Report is what Run found, as JSON.
type Report struct {
	Backend    string       `json:"backend"`
	Simulated  bool         `json:"simulated"`
	Graph      bool         `json:"graph"` // always false: capture changes no bit
	Seed       uint64       `json:"seed"`
	Elements   int          `json:"elements"`
	Tokens     int          `json:"tokens"`
	Devices    []Device     `json:"devices"`
	Errors     []ErrorRow   `json:"errors"`
	Divergence []Divergence `json:"divergence"`
	Model      ModelInfo    `json:"transformer"`
	Findings   []string     `json:"findings"` // what makes OK false, each in a sentence
	Warnings   []string     `json:"warnings"`
	Error      string       `json:"error,omitempty"` // why it could not be finished
	OK         bool         `json:"ok"`
}

// Device is a device the reductions ran on.
type Device struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	UUID  string `json:"uuid"`
}

// By says whose sum a row shows, and how it was had.
type By struct {
	By     string   `json:"by"`     // ours, nccl
	Wire   string   `json:"wire"`   // f32, bf16
	Source string   `json:"source"` // measured: reductions that ran; model: computed on the CPU
	Paths  []string `json:"paths"`  // that ran, each checked; the figures are those of the first
	// RanksEqual: every rank ended with the same bits. Wrong counts the elements whose bits differ from the CPU
	// reference (for NCCL measured: from the model, which is exact for two ranks), over all paths.
	RanksEqual bool  `json:"ranks_equal"`
	Wrong      int64 `json:"wrong"`
}

// ErrorRow is the error of one sum against float64.
type ErrorRow struct {
	Ranks        int    `json:"ranks"`
	Distribution string `json:"distribution"`
	By
	Errors
}

// Divergence is what one wire does to the transformer's logits, against F32 reductions.
type Divergence struct {
	By
	KL
}

const (
	byOurs         = "ours"
	byNCCL         = "nccl"
	sourceMeasured = "measured"
	sourceModel    = "model"
)

// wires are the wires compared, with the paths of ours in the order of preference for the transformer's reductions.
var wires = []struct {
	wire  allreduce.Type
	paths []allreduce.Algorithm
}{
	{allreduce.F32, []allreduce.Algorithm{allreduce.AlgorithmInternal, allreduce.AlgorithmCopyEngine, allreduce.AlgorithmPeer}},
	{allreduce.BF16, []allreduce.Algorithm{allreduce.AlgorithmCopyEngine, allreduce.AlgorithmInternal, allreduce.AlgorithmPeer}},
}

// NewReport is a report without results.
func NewReport(backend string, o Options) *Report {
	return &Report{Backend: backend, Seed: o.Seed, Elements: o.Elements, Tokens: o.Tokens, Devices: []Device{}, Errors: []ErrorRow{},
		Divergence: []Divergence{}, Model: ModelInfo{Shape: o.Shape}, Findings: []string{}, Warnings: []string{}}
}

// Run fills in a report; what was measured before an error stays in it.
func (r *Report) Run(ctx context.Context, o Options) error {
	r.Backend = o.Driver.Backend().String()
	r.Simulated = o.Driver.Backend() == device.Emulated
	if o.Step == nil {
		o.Step = func(string) {}
	}
	m := &measurement{Report: r, o: o, ctx: ctx}
	for _, ranks := range o.Ranks {
		if err := m.errorsOf(ranks); err != nil {
			return err
		}
	}
	if o.Elements < JudgedElements {
		r.warn(fmt.Sprintf("%d elements are too few to judge our error against NCCL's: %d are needed", o.Elements, JudgedElements))
	}
	if err := m.divergence(); err != nil {
		return err
	}
	r.OK = len(r.Findings) == 0
	return nil
}

func (r *Report) find(format string, args ...any) {
	r.Findings = append(r.Findings, fmt.Sprintf(format, args...))
}

func (r *Report) warn(text string) {
	if !slices.Contains(r.Warnings, text) {
		r.Warnings = append(r.Warnings, text)
	}
}

// measurement is Run at work.
type measurement struct {
	*Report
	o   Options
	ctx context.Context // of the call
}

// sum reduces once and says what came of it: the total on rank 0, whether the other ranks have the same bits, and how
// many elements differ from what was expected.
type sum struct {
	values     []float32
	ranksEqual bool
	wrong      int64
}

// errorsOf measures every wire on every distribution for a number of ranks.
func (m *measurement) errorsOf(ranks int) error {
	for _, w := range wires {
		ours, err := m.open(ranks, w.wire, m.o.Elements, w.paths...)
		if err != nil {
			return err
		}
		err = m.errorsOn(ranks, w.wire, ours)
		for _, reducer := range ours {
			reducer.close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *measurement) errorsOn(ranks int, wire allreduce.Type, ours []*reducer) error {
	nccl, err := m.openNCCL(ranks, wire, m.o.Elements)
	if err != nil {
		return err
	}
	if nccl != nil {
		defer nccl.close()
	}
	for _, d := range Distributions {
		m.o.Step(fmt.Sprintf("%d ranks, %s, wire %s", ranks, d, wire))
		inputs := Inputs(d, m.o.Seed, ranks, m.o.Elements)
		exact := Exact(inputs)
		by, values, err := m.sumOurs(ours, wire, inputs)
		if err != nil {
			return err
		}
		row := ErrorRow{Ranks: ranks, Distribution: d.String(), By: by, Errors: Measure(values, exact, wire)}
		by, values, err = m.sumNCCL(nccl, wire, inputs)
		if err != nil {
			return err
		}
		other := ErrorRow{Ranks: ranks, Distribution: d.String(), By: by, Errors: Measure(values, exact, wire)}
		m.Report.Errors = append(m.Report.Errors, row, other)
		m.judge(row, other)
	}
	return nil
}

// judge compares our error with NCCL's. With an F32 wire and three or more ranks both round N-1 times, in another
// order, and the last figures are chance: 1 % is allowed.
func (r *Report) judge(ours, nccl ErrorRow) {
	what := fmt.Sprintf("%d ranks, %s, wire %s", ours.Ranks, ours.Distribution, ours.Wire)
	r.judgeBits(what, ours.By)
	if r.Elements < JudgedElements {
		return
	}
	allowed := 1.0
	if ours.Wire == allreduce.F32.String() && ours.Ranks >= 3 {
		allowed = 1.01
	}
	for _, figure := range []struct {
		name       string
		ours, nccl float64
	}{{"mean", ours.Mean, nccl.Mean}, {"RMS", ours.RMS, nccl.RMS}} {
		if !(figure.ours <= figure.nccl*allowed) {
			r.find("%s: our %s error %.5g is above NCCL's %.5g", what, figure.name, figure.ours, figure.nccl)
		}
	}
}

// judgeBits: ours must be the reference's bits on every rank.
func (r *Report) judgeBits(what string, by By) {
	if !by.RanksEqual {
		r.find("%s: the ranks ended with different bits", what)
	}
	if by.Wrong > 0 {
		r.find("%s: %d elements differ from the CPU reference", what, by.Wrong)
	}
}

// sumOurs reduces on every path given.
func (m *measurement) sumOurs(ours []*reducer, wire allreduce.Type, inputs [][]float32) (By, []float32, error) {
	by := By{By: byOurs, Wire: wire.String(), Source: sourceMeasured, RanksEqual: true}
	want, err := referenceSum(inputs, wire)
	if err != nil {
		return by, nil, err
	}
	var values []float32
	for _, reducer := range ours {
		s, err := reducer.sum(m.ctx, inputs, want)
		if err != nil {
			return by, nil, err
		}
		if values == nil {
			values = s.values
		}
		by.add(reducer, s)
	}
	return by, values, nil
}

// add counts a reduction in.
func (b *By) add(r *reducer, s sum) {
	if path := r.path.String(); !slices.Contains(b.Paths, path) {
		b.Paths = append(b.Paths, path)
	}
	b.RanksEqual = b.RanksEqual && s.ranksEqual
	b.Wrong += s.wrong
}

// sumNCCL reduces with NCCL, or computes what it gives where reducer is nil.
func (m *measurement) sumNCCL(reducer *reducer, wire allreduce.Type, inputs [][]float32) (By, []float32, error) {
	by := By{By: byNCCL, Wire: wire.String(), Source: sourceModel, Paths: []string{}, RanksEqual: true}
	values := NCCLSum(inputs, wire)
	if reducer == nil {
		return by, values, nil
	}
	by.Source = sourceMeasured
	s, err := reducer.sum(m.ctx, inputs, values)
	if errors.Is(err, allreduce.ErrNCCL) {
		m.warn(fmt.Sprintf("NCCL failed, a CPU model takes its place: %v", err))
		by.Source = sourceModel
		return by, values, nil
	}
	if err != nil {
		return by, nil, err
	}
	if len(inputs) > 2 {
		s.wrong = 0 // the order of NCCL's additions depends on its algorithm and chunks: the model is no measure of it
	}
	by.add(reducer, s)
	if s.wrong > 0 {
		m.warn(fmt.Sprintf("NCCL's sum of two ranks with wire %s is not the model's", wire))
	}
	if !s.ranksEqual {
		m.warn(fmt.Sprintf("NCCL left other bits on other ranks, wire %s", wire))
	}
	return by, s.values, nil
}

// open makes a reducer for each of the paths that exists here.
func (m *measurement) open(ranks int, wire allreduce.Type, elements int, paths ...allreduce.Algorithm) ([]*reducer, error) {
	var list []*reducer
	var missing error
	for _, path := range paths {
		r, err := newReducer(m.o.Driver, path, wire, ranks, elements)
		switch {
		case err == nil:
			list = append(list, r)
			m.note(r)
		case errors.Is(err, allreduce.ErrUnsupported):
			missing = errors.Join(missing, err)
		default:
			for _, r := range list {
				r.close()
			}
			return nil, err
		}
	}
	if len(list) == 0 {
		return nil, missing
	}
	return list, nil
}

// openNCCL gives nil where NCCL's rows come from the model: on emulated devices, and where there is no NCCL that takes
// these ranks.
func (m *measurement) openNCCL(ranks int, wire allreduce.Type, elements int) (*reducer, error) {
	if m.o.Driver.Backend() == device.Emulated && !m.o.emulatedNCCL {
		return nil, nil // nil: the model
	}
	r, err := newReducer(m.o.Driver, allreduce.AlgorithmNCCL, wire, ranks, elements)
	if errors.Is(err, allreduce.ErrNCCL) || errors.Is(err, allreduce.ErrUnsupported) {
		m.warn(fmt.Sprintf("%d ranks: NCCL's rows are computed by a CPU model: %v", ranks, err))
		return nil, nil // nil: the model
	}
	return r, err
}

// note keeps the devices and the warnings of a communicator.
func (m *measurement) note(r *reducer) {
	for _, dev := range r.devices {
		if !slices.ContainsFunc(m.Devices, func(d Device) bool { return d.Index == dev }) {
			if info, err := m.o.Driver.Info(dev); err == nil {
				m.Devices = append(m.Devices, Device{Index: dev, Name: info.Name, UUID: info.UUID})
			}
		}
	}
	for _, w := range r.comm.Stats().Warnings {
		m.warn(w)
	}
}

// divergence runs the transformer once per wire.
func (m *measurement) divergence() error {
	const ranks = 2
	m.o.Step("transformer, weights")
	model := NewTransformer(m.o.Shape, m.o.Seed)
	tokens := model.Tokens(m.o.Seed, m.o.Tokens)
	forward := func(reduce Reduce) ([]float32, error) {
		return model.Logits(tokens, func(parts [][]float32) ([]float32, error) {
			if err := m.ctx.Err(); err != nil {
				return nil, errors.New("interrupted")
			}
			return reduce(parts)
		})
	}
	m.o.Step("transformer, F32 reductions")
	base, err := forward(func(parts [][]float32) ([]float32, error) { return NCCLSum(parts, allreduce.F32), nil })
	if err != nil {
		return err
	}
	m.Model.describe(base)
	elements := m.o.Tokens * m.o.Shape.Width
	for _, w := range wires {
		m.o.Step(fmt.Sprintf("transformer, wire %s", w.wire))
		var ours []*reducer
		for _, path := range w.paths { // the first there is
			if ours, err = m.open(ranks, w.wire, elements, path); err == nil || !errors.Is(err, allreduce.ErrUnsupported) {
				break
			}
		}
		if err != nil {
			return err
		}
		row := Divergence{By: By{By: byOurs, Wire: w.wire.String(), Source: sourceMeasured, RanksEqual: true}}
		logits, err := forward(func(parts [][]float32) ([]float32, error) {
			by, values, err := m.sumOurs(ours, w.wire, parts)
			row.Paths, row.RanksEqual, row.Wrong = by.Paths, row.RanksEqual && by.RanksEqual, row.Wrong+by.Wrong
			return values, err
		})
		ours[0].close()
		if err != nil {
			return err
		}
		row.KL = Compare(base, logits, m.o.Shape.Vocab)
		what := "transformer, wire " + w.wire.String()
		m.judgeBits(what, row.By)
		if w.wire == allreduce.F32 && (row.Max != 0 || row.SameTop != 1) {
			m.find("%s: the logits are not those of F32 reductions", what)
		}
		m.Report.Divergence = append(m.Report.Divergence, row)

		m.o.Step(fmt.Sprintf("transformer, wire %s, NCCL", w.wire))
		row = Divergence{By: By{By: byNCCL, Wire: w.wire.String(), RanksEqual: true}}
		nccl, err := m.openNCCL(ranks, w.wire, elements)
		if err != nil {
			return err
		}
		if nccl == nil && w.wire == allreduce.F32 {
			logits = base // the model's sum of two F32 values is the base's own
			row.Source, row.Paths = sourceModel, []string{}
		} else {
			logits, err = forward(func(parts [][]float32) ([]float32, error) {
				by, values, err := m.sumNCCL(nccl, w.wire, parts)
				row.Source, row.Paths = by.Source, by.Paths
				row.RanksEqual, row.Wrong = row.RanksEqual && by.RanksEqual, row.Wrong+by.Wrong
				return values, err
			})
			if nccl != nil {
				nccl.close()
			}
			if err != nil {
				return err
			}
		}
		row.KL = Compare(base, logits, m.o.Shape.Vocab)
		m.Report.Divergence = append(m.Report.Divergence, row)
	}
	return nil
}

// finite keeps NaN and infinities out of the JSON, which has no word for them.
func finite(x float64) float64 {
	switch {
	case x != x:
		return math.MaxFloat64
	case math.IsInf(x, 0):
		return math.Copysign(math.MaxFloat64, x)
	}
	return x
}
