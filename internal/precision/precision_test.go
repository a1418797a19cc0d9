package precision

import (
	"context"
	"encoding/json"
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
	"gpu.example/allreduce/internal/testnccl"
)

func TestMain(m *testing.M) { testbackend.Main(m) }

// tiny keeps the tests quick.
var tiny = Shape{Layers: 2, Width: 32, Heads: 2, FFN: 64, Vocab: 128, Sequence: 8}

func plain(parts [][]float32) ([]float32, error) { return NCCLSum(parts, allreduce.F32), nil }

// One sum by hand. BF16's ulp at 1 is 2^-7, so the inputs become 1 + 2^-7 and 2^-8. Their sum lies half way between two
// BF16 numbers: ours keeps it, NCCL's goes to the even one, 1 + 2^-6.
func TestByHand(t *testing.T) {
	inputs := [][]float32{{1 + 0x1p-7 + 0x1p-10}, {0x1p-8}}
	exact := Exact(inputs)
	require.Equal(t, []float64{1 + 0x1p-7 + 0x1p-8 + 0x1p-10}, exact)

	ours, err := referenceSum(inputs, allreduce.BF16)
	require.NoError(t, err)
	require.Equal(t, []float32{1 + 0x1p-7 + 0x1p-8}, ours)
	require.Equal(t, Errors{0x1p-10, 0x1p-10, 0x1p-10, 0x1p-3, 0x1p-3, 0x1p-3}, Measure(ours, exact, allreduce.BF16))

	nccl := NCCLSum(inputs, allreduce.BF16)
	require.Equal(t, []float32{1 + 0x1p-6}, nccl)
	require.Equal(t, Errors{3 * 0x1p-10, 3 * 0x1p-10, 3 * 0x1p-10, 3 * 0x1p-3, 3 * 0x1p-3, 3 * 0x1p-3}, Measure(nccl, exact, allreduce.BF16))

	require.Equal(t, exact, []float64{float64(NCCLSum(inputs, allreduce.F32)[0])})
}

func TestMeasure(t *testing.T) {
	e := Measure([]float32{1, 2, 4}, []float64{1, 2 + 0x1p-20, 4 - 0x1p-21}, allreduce.F32)
	require.InDelta(t, 0x1p-20, e.Max, 0)
	require.InEpsilon(t, (0x1p-20+0x1p-21)/3, e.Mean, 1e-12)
	require.InEpsilon(t, math.Sqrt((0x1p-40+0x1p-42)/3), e.RMS, 1e-12)
	require.InDelta(t, 4, e.MaxULP, 0) // 2^-20 at 2: the ulp is 2^-22; 2^-21 just below 4: the same
	require.InEpsilon(t, (4.0+2)/3, e.MeanULP, 1e-12)
	require.InEpsilon(t, math.Sqrt((16.0+4)/3), e.RMSULP, 1e-12)

	broken := Measure([]float32{float32(math.NaN()), 1}, []float64{1, 1}, allreduce.F32)
	_, err := json.Marshal(broken)
	require.NoError(t, err)
	require.InDelta(t, math.MaxFloat64, broken.Mean, 0, "a NaN is no small error")
}

func TestULP(t *testing.T) {
	for _, x := range []float32{1, -1.5, 3e38, 1e-30, 0x1p-126, 0x1p-140, 0} {
		got := float64(math.Nextafter32(float32(math.Abs(float64(x))), float32(math.Inf(1)))) - math.Abs(float64(x))
		require.InDelta(t, got, ulp(float64(x), allreduce.F32), 0, x)
		require.InDelta(t, got*65536, ulp(float64(x), allreduce.BF16), 0, x)
	}
}

// The model of more than two ranks: part c of the elements starts at rank c+1.
func TestNCCLSumOrder(t *testing.T) {
	inputs := [][]float32{{1e8, 1e8, 1e8}, {1, 1, 1}, {-1e8, -1e8, -1e8}}
	// (1 - 1e8) + 1e8, (-1e8 + 1e8) + 1, (1e8 + 1) - 1e8, where 1 is less than half an ulp of 1e8
	require.Equal(t, []float32{0, 1, 0}, NCCLSum(inputs, allreduce.F32))
	require.Equal(t, []float32{0, 1, 0}, NCCLSum(inputs, allreduce.BF16))
}

// What makes the model exact: adding BF16 in F32 and rounding then is rounding the exact sum once.
func TestOneRounding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) float32 {
			exponent := rapid.Uint16Range(60, 190).Draw(t, name+" exponent")
			fraction := rapid.Uint16Range(0, 127).Draw(t, name+" fraction")
			sign := rapid.Uint16Range(0, 1).Draw(t, name+" sign")
			return reference.BF16ToF32(sign<<15 | exponent<<7 | fraction)
		}
		a, b := draw("a"), draw("b")
		exact := new(big.Float).SetPrec(400).Add(big.NewFloat(float64(a)), big.NewFloat(float64(b)))
		want, _ := new(big.Float).SetPrec(8).SetMode(big.ToNearestEven).Set(exact).Float32()
		require.InDelta(t, want, NCCLSum([][]float32{{a}, {b}}, allreduce.BF16)[0], 0)
	})
}

func TestInputs(t *testing.T) {
	const ranks, count = 3, 100_000
	largest := map[Distribution]float64{}
	for _, d := range Distributions {
		inputs := Inputs(d, 1, ranks, count)
		require.Equal(t, inputs, Inputs(d, 1, ranks, count))
		require.NotEqual(t, inputs, Inputs(d, 2, ranks, count))
		variance := 0.0
		var each [ranks]float64
		for rank, input := range inputs {
			require.Len(t, input, count)
			for _, x := range input {
				each[rank] += float64(x) * float64(x) / count
				largest[d] = max(largest[d], math.Abs(float64(x)))
			}
			variance += each[rank] / ranks
			require.InEpsilon(t, each[0], each[rank], 0.1, "no rank is special")
		}
		switch d {
		case Normal:
			require.InDelta(t, 1, variance, 0.02)
		case HeavyTailed:
			require.InDelta(t, 5.0/3, variance, 0.1)
		case Cancelling:
			for _, total := range Exact(inputs) {
				require.GreaterOrEqual(t, math.Abs(total), 0x1p-10-0x1p-20)
				require.LessOrEqual(t, math.Abs(total), 1+0x1p-20)
			}
		}
	}
	require.Less(t, largest[Normal], 6.0)
	require.Greater(t, largest[HeavyTailed], 12.0)
}

func TestCompare(t *testing.T) {
	ln := func(p float64) float32 { return float32(math.Log(p)) }
	// Two positions of two tokens: 0.5, 0.5 against 0.25, 0.75; and the same but for a constant, which changes nothing.
	base := []float32{ln(0.5), ln(0.5), 0, 3}
	other := []float32{ln(0.25), ln(0.75), 5, 8}
	kl := 0.5*math.Log(2) + 0.5*math.Log(2.0/3)
	got := Compare(base, other, 2)
	require.InDelta(t, kl/2, got.Mean, 1e-7)
	require.InDelta(t, kl, got.Max, 1e-7)
	require.InDelta(t, kl/2, got.StdErr, 1e-7) // deviation of {kl, 0} is kl/sqrt 2
	require.InDelta(t, 0.5, got.SameTop, 0)    // of equal logits the first counts

	require.Equal(t, KL{SameTop: 1}, Compare(base, base, 2))
}

func TestCompareIsNeverNegative(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		logits := rapid.SliceOfN(rapid.Float32Range(-30, 30), 6, 6)
		got := Compare(logits.Draw(t, "base"), logits.Draw(t, "other"), 3)
		require.GreaterOrEqual(t, got.Mean, 0.0)
		require.GreaterOrEqual(t, got.Max, got.Mean)
		require.GreaterOrEqual(t, got.StdErr, 0.0)
	})
}

func TestTransformer(t *testing.T) {
	model := NewTransformer(tiny, 1)
	tokens := model.Tokens(1, 20) // two sequences and a half
	logits, err := model.Logits(tokens, plain)
	require.NoError(t, err)
	require.Len(t, logits, 20*tiny.Vocab)
	at := func(logits []float32, from, to int) []float32 { return logits[from*tiny.Vocab : to*tiny.Vocab] }

	again, err := NewTransformer(tiny, 1).Logits(model.Tokens(1, 20), plain)
	require.NoError(t, err)
	require.Equal(t, logits, again)
	before := runtime.GOMAXPROCS(1)
	again, err = NewTransformer(tiny, 1).Logits(tokens, plain)
	runtime.GOMAXPROCS(before)
	require.NoError(t, err)
	require.Equal(t, logits, again, "the number of processors changes no bit")

	// A token changes what comes from there on in its sequence, and nothing else.
	changed := append([]int{}, tokens...)
	changed[11] = (changed[11] + 1) % tiny.Vocab
	other, err := model.Logits(changed, plain)
	require.NoError(t, err)
	require.Equal(t, at(logits, 0, 11), at(other, 0, 11))
	for i := 11; i < 16; i++ {
		require.NotEqual(t, at(logits, i, i+1), at(other, i, i+1), i)
	}
	require.Equal(t, at(logits, 16, 20), at(other, 16, 20))

	// The parts are a split of one sum: both matter, and their order does not.
	swapped, err := model.Logits(tokens, func(parts [][]float32) ([]float32, error) { return plain([][]float32{parts[1], parts[0]}) })
	require.NoError(t, err)
	require.Equal(t, logits, swapped)
	for rank := range 2 {
		half, err := model.Logits(tokens, func(parts [][]float32) ([]float32, error) { return parts[rank], nil })
		require.NoError(t, err)
		require.Greater(t, Compare(logits, half, tiny.Vocab).Mean, 0.01)
	}
}

// TestAttentionAndFeedForward compares the blocks with the textbook's formulas in float64.
func TestAttentionAndFeedForward(t *testing.T) {
	model := NewTransformer(tiny, 3)
	x := newMatrix(5, tiny.Width)
	random := rand.New(rand.NewPCG(1, 1))
	for i := range x.Data {
		x.Data[i] = float32(random.NormFloat64())
	}
	h := &model.layers[0].ranks[1]
	times := func(weights interface{ at(o, i int) float64 }, outputs int, x [][]float64) [][]float64 {
		out := make([][]float64, len(x))
		for p := range x {
			out[p] = make([]float64, outputs)
			for o := range outputs {
				for i, v := range x[p] {
					out[p][o] += weights.at(o, i) * v
				}
			}
		}
		return out
	}
	wide := make([][]float64, x.Rows)
	for p := range wide {
		for _, v := range row(x, p) {
			wide[p] = append(wide[p], float64(v))
		}
	}
	gate, up := times(matrix64(h.gate), tiny.FFN/2, wide), times(matrix64(h.up), tiny.FFN/2, wide)
	for p := range gate {
		for i, g := range gate[p] {
			gate[p][i] = g / (1 + math.Exp(-g)) * up[p][i]
		}
	}
	requireClose(t, times(matrix64(h.down), tiny.Width, gate), feedForward(h, x))

	dim := tiny.Width / tiny.Heads
	turn := func(x [][]float64) [][]float64 {
		for p := range x {
			for c := 0; c < dim; c += 2 {
				sin, cos := math.Sincos(float64(p) * math.Pow(10000, -float64(c)/float64(dim)))
				x[p][c], x[p][c+1] = x[p][c]*cos-x[p][c+1]*sin, x[p][c]*sin+x[p][c+1]*cos
			}
		}
		return x
	}
	// One head a rank, so its width is the rank's.
	query, key := turn(times(matrix64(h.query), dim, wide)), turn(times(matrix64(h.key), dim, wide))
	value := times(matrix64(h.value), dim, wide)
	mixed := make([][]float64, len(wide))
	for p := range mixed {
		mixed[p] = make([]float64, dim)
		total := 0.0
		for q := 0; q <= p; q++ {
			score := 0.0
			for c := range dim {
				score += query[p][c] * key[q][c]
			}
			weight := math.Exp(score / math.Sqrt(float64(dim)))
			total += weight
			for c := range dim {
				mixed[p][c] += weight * value[q][c]
			}
		}
		for c := range dim {
			mixed[p][c] /= total
		}
	}
	requireClose(t, times(matrix64(h.out), tiny.Width, mixed), model.attention(h, x))
}

// What a reduction's error does grows with the error, and F32 does nothing.
func TestRun(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		o := Options{Driver: d, Ranks: []int{2, 3}, Elements: 20_000, Tokens: 40, Shape: tiny, Seed: 1}
		steps := 0
		o.Step = func(string) { steps++ }
		report := NewReport("auto", o)
		require.NoError(t, report.Run(t.Context(), o))
		require.True(t, report.OK)
		require.Empty(t, report.Findings)
		require.Positive(t, steps)
		require.Equal(t, d.Backend().String(), report.Backend)
		require.Equal(t, d.Backend() == device.Emulated, report.Simulated)
		require.NotEmpty(t, report.Devices)
		require.Contains(t, strings.Join(report.Warnings, "\n"), "20000 elements are too few")

		require.Len(t, report.Errors, 2*2*3*2)
		for i := 0; i < len(report.Errors); i += 2 {
			ours, nccl := report.Errors[i], report.Errors[i+1]
			require.Equal(t, byOurs, ours.By.By)
			require.Equal(t, sourceMeasured, ours.Source)
			require.Contains(t, ours.Paths, "internal")
			require.Contains(t, ours.Paths, "copy-engine")
			require.True(t, ours.RanksEqual)
			require.Zero(t, ours.Wrong)
			require.Equal(t, byNCCL, nccl.By.By)
			require.Equal(t, ours.Wire, nccl.Wire)
			require.Equal(t, ours.Ranks, nccl.Ranks)
			require.Equal(t, ours.Distribution, nccl.Distribution)
			for _, e := range []ErrorRow{ours, nccl} {
				require.LessOrEqual(t, e.Mean, e.RMS)
				require.LessOrEqual(t, e.RMS, e.Max)
				require.Positive(t, e.MaxULP)
			}
			switch {
			case ours.Wire == "f32" && ours.Ranks == 2:
				require.Equal(t, ours.Errors, nccl.Errors, "one addition, one rounding")
				require.LessOrEqual(t, ours.MaxULP, 0.5)
			case ours.Wire == "bf16" && ours.Distribution != "cancelling":
				require.Less(t, ours.Mean, nccl.Mean)
				require.Less(t, ours.RMS, nccl.RMS)
			}
			if d.Backend() == device.Emulated {
				require.Equal(t, sourceModel, nccl.Source)
				require.Empty(t, nccl.Paths)
			} else if nccl.Source == sourceMeasured && nccl.Ranks == 2 {
				require.Zero(t, nccl.Wrong, "the model is exact for two ranks")
			}
		}

		require.Len(t, report.Divergence, 4)
		for _, row := range report.Divergence {
			require.True(t, row.RanksEqual)
			require.Zero(t, row.Wrong)
			if row.Wire == "f32" {
				require.Equal(t, KL{SameTop: 1}, row.KL, "%+v", row)
			} else {
				require.Positive(t, row.Mean)
				require.Positive(t, row.StdErr)
				require.Greater(t, row.Max, row.Mean)
				require.Less(t, row.Mean, 0.01)
				require.Greater(t, row.SameTop, 0.8)
			}
		}
		ours, nccl := report.Divergence[2], report.Divergence[3]
		require.Equal(t, "bf16", ours.Wire)
		require.Less(t, ours.Mean, nccl.Mean)
		require.Positive(t, report.Model.Entropy)
		require.Greater(t, report.Model.TopProbability, 1.0/float64(tiny.Vocab))
		_, err := json.Marshal(report)
		require.NoError(t, err)
	})
}

// Devices that are fewer than the ranks are shared.
func TestSharedDevices(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		o := Options{Driver: d, Ranks: []int{3}, Elements: 96, Tokens: 4, Shape: tiny, Seed: 1}
		report := NewReport("emulated", o)
		require.NoError(t, report.Run(t.Context(), o))
		require.True(t, report.OK, report.Findings)
		require.Len(t, report.Devices, 2)
	})
}

func TestWrongSumsAreFound(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		const count = 64
		r, err := newReducer(d, allreduce.AlgorithmInternal, allreduce.F32, 2, count)
		require.NoError(t, err)
		defer r.close()
		require.NoError(t, r.comm.Close())
		r.comm, err = allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, Algorithm: allreduce.AlgorithmInternal,
			NoOp: allreduce.On})
		require.NoError(t, err)
		report := NewReport("emulated", Options{})
		m := &measurement{Report: report, ctx: t.Context()}
		by, _, err := m.sumOurs([]*reducer{r}, allreduce.F32, Inputs(Normal, 1, 2, count))
		require.NoError(t, err)
		require.EqualValues(t, 2*count, by.Wrong)
		report.judgeBits("x", by)
		require.Equal(t, []string{"x: 128 elements differ from the CPU reference"}, report.Findings)

		// Another route than the one asked for is no measurement of it.
		r.path = allreduce.PathCopyEngine
		_, _, err = m.sumOurs([]*reducer{r}, allreduce.F32, Inputs(Normal, 1, 2, count))
		require.ErrorIs(t, err, allreduce.ErrUnsupported)
	})
}

// NCCL's rows as a GPU machine has them, with the emulated library: for two ranks it gives the model's bits.
func TestMeasuredNCCL(t *testing.T) {
	library := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(3), func(t *testing.T, d device.Driver) {
		t.Setenv("GGML_CUDA_NCCL_LIB", library)
		o := Options{Driver: d, Ranks: []int{2, 3, 4}, Elements: 4096, Tokens: 12, Shape: tiny, Seed: 1, emulatedNCCL: true}
		report := NewReport("emulated", o)
		require.NoError(t, report.Run(t.Context(), o))
		require.True(t, report.OK, report.Findings)
		for _, row := range report.Errors {
			if row.By.By != byNCCL {
				continue
			}
			require.Zero(t, row.Wrong, "%+v", row)
			if row.Ranks == 4 { // two of them would share a device
				require.Equal(t, sourceModel, row.Source)
			} else {
				require.Equal(t, sourceMeasured, row.Source)
				require.Equal(t, []string{"nccl"}, row.Paths)
			}
		}
		require.Contains(t, strings.Join(report.Warnings, "\n"), "4 ranks: NCCL's rows are computed by a CPU model")
		for _, row := range report.Divergence {
			require.Zero(t, row.Wrong)
			require.Equal(t, sourceMeasured, row.Source)
		}

		t.Setenv("AR_EMULATED_NCCL", "call")
		report = NewReport("emulated", o)
		require.NoError(t, report.Run(t.Context(), o))
		require.Contains(t, strings.Join(report.Warnings, "\n"), "NCCL failed, a CPU model takes its place")
	})
}

// The environment must not choose what is measured.
func TestEnvironment(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		for name, value := range map[string]string{"GGML_CUDA_ALLREDUCE": "none", "GGML_CUDA_AR_CE": "0", "GGML_CUDA_AR_NOOP": "1",
			"GGML_CUDA_AR_WIRE": "f16", "GGML_CUDA_AR_BF16_THRESHOLD": "1", "GGML_CUDA_AR_NCCL_MIN_BYTES": "1"} {
			t.Setenv(name, value)
		}
		o := Options{Driver: d, Ranks: []int{2}, Elements: 1000, Tokens: 9, Shape: tiny, Seed: 7}
		report := NewReport("emulated", o)
		require.NoError(t, report.Run(t.Context(), o))
		require.True(t, report.OK, report.Findings)
	})
}

func TestInterrupted(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		ctx, cancel := context.WithCancel(t.Context())
		o := Options{Driver: d, Ranks: []int{2}, Elements: 1000, Tokens: 9, Shape: tiny, Seed: 1}
		o.Step = func(what string) {
			if strings.Contains(what, "transformer") {
				cancel()
			}
		}
		report := NewReport("emulated", o)
		require.ErrorContains(t, report.Run(ctx, o), "interrupted")
		require.False(t, report.OK)
		require.Len(t, report.Errors, 12)
	})
}

func TestJudge(t *testing.T) {
	row := func(ranks int, wire string, mean, rms float64) ErrorRow {
		return ErrorRow{Ranks: ranks, Distribution: "normal", By: By{Wire: wire, RanksEqual: true}, Errors: Errors{Mean: mean, RMS: rms}}
	}
	for _, c := range []struct {
		name       string
		elements   int
		ours, nccl ErrorRow
		findings   int
	}{
		{"equal", JudgedElements, row(2, "f32", 1, 2), row(2, "f32", 1, 2), 0},
		{"mean above", JudgedElements, row(2, "f32", 1.0001, 2), row(2, "f32", 1, 2), 1},
		{"both above", JudgedElements, row(2, "bf16", 1.0001, 2.1), row(2, "bf16", 1, 2), 2},
		{"1 % above, three ranks", JudgedElements, row(3, "f32", 1.0099, 2.019), row(3, "f32", 1, 2), 0},
		{"more, three ranks", JudgedElements, row(3, "f32", 1.0101, 2.021), row(3, "f32", 1, 2), 2},
		{"1 % above, BF16", JudgedElements, row(3, "bf16", 1.0099, 2), row(3, "bf16", 1, 2), 1},
		{"not a number", JudgedElements, row(2, "f32", math.NaN(), 2), row(2, "f32", 1, 2), 1},
		{"too few", JudgedElements - 1, row(2, "bf16", 2, 3), row(2, "bf16", 1, 2), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			report := NewReport("emulated", Options{Elements: c.elements})
			report.judge(c.ours, c.nccl)
			require.Len(t, report.Findings, c.findings, report.Findings)
		})
	}
	report := NewReport("emulated", Options{Elements: 1})
	bad := row(2, "f32", 1, 1)
	bad.RanksEqual, bad.Wrong = false, 3
	report.judge(bad, row(2, "f32", 1, 1))
	assert.Len(t, report.Findings, 2)
	assert.Contains(t, report.Findings[1], "3 elements differ")
}
