package reference

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/big"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/x448/float16"
	"pgregory.net/rapid"
)

func nan(f float32) bool { return f != f }

func TestF16AgainstAnother(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		f := F16ToF32(h)
		want := float16.Frombits(h).Float32()
		if nan(want) {
			require.True(t, nan(f), "%04x", h)
			require.Equal(t, uint16(CanonicalNaN16), F32ToF16(f))
			continue
		}
		if math.Float32bits(want) != math.Float32bits(f) || F32ToF16(f) != h {
			t.Fatalf("%04x is %g, not %g, and comes back as %04x", h, f, want, F32ToF16(f))
		}
	}
	check := func(bits uint32) {
		f := math.Float32frombits(bits)
		got := F32ToF16(f)
		want := float16.Fromfloat32(f).Bits()
		if nan(f) {
			want = CanonicalNaN16
		}
		if got != want { // a million comparisons: require.Equal would take most of the time
			t.Fatalf("%08x becomes %04x, not %04x", bits, got, want)
		}
	}
	// Every upper half of an F32 with the lower halves around each tie: 13 or more bits are rounded away.
	for high := range uint32(1 << 16) {
		for _, low := range []uint32{0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF} {
			check(high<<16 | low)
		}
	}
}

// nearestBF16 rounds by arithmetic on real numbers, not on bits.
func nearestBF16(f float32) uint16 {
	if f == 0 || math.IsInf(float64(f), 0) {
		return uint16(math.Float32bits(f) >> 16)
	}
	_, exponent := math.Frexp(float64(f))
	unit := math.Ldexp(1, max(exponent-8, -133)) // 8 significant bits; subnormals count units of 2^-133
	rounded := math.RoundToEven(float64(f)/unit) * unit
	if math.Abs(rounded) >= 0x1p128 {
		return uint16(math.Float32bits(float32(math.Inf(int(math.Copysign(1, rounded))))) >> 16)
	}
	return uint16(math.Float32bits(float32(rounded)) >> 16)
}

func TestBF16AgainstArithmetic(t *testing.T) {
	for high := range uint32(1 << 16) {
		exact := BF16ToF32(uint16(high))
		if math.Float32bits(exact) != high<<16 {
			t.Fatalf("%04x widens to %08x", high, math.Float32bits(exact))
		}
		for _, low := range []uint32{0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF} {
			f := math.Float32frombits(high<<16 | low)
			want := uint16(CanonicalNaN16)
			if !nan(f) {
				want = nearestBF16(f)
			}
			if got := F32ToBF16(f); got != want {
				t.Fatalf("%08x becomes %04x, not %04x", high<<16|low, got, want)
			}
		}
	}
}

func f32s(values ...float32) []byte {
	var b []byte
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

func u16s(values ...uint16) []byte {
	var b []byte
	for _, v := range values {
		b = binary.LittleEndian.AppendUint16(b, v)
	}
	return b
}

func result(t require.TestingT, r Reduction) []byte {
	out, err := r.Result()
	require.NoError(t, err)
	return out
}

func TestRules(t *testing.T) {
	inf, negZero := float32(math.Inf(1)), float32(math.Copysign(0, -1))
	canonical := math.Float32frombits(CanonicalNaN32)
	for _, c := range []struct {
		name string
		r    Reduction
		want []byte
	}{
		{"starts with rank 0's value: -0 + -0 is -0", Reduction{Inputs: [][]byte{f32s(negZero), f32s(negZero)}}, f32s(negZero)},
		{"an absent rank adds +0", Reduction{Inputs: [][]byte{f32s(negZero), nil}, Absent: []bool{false, true}}, f32s(0)},
		{"an absent rank 0 starts with +0", Reduction{Inputs: [][]byte{nil, f32s(negZero)}, Absent: []bool{true, false}}, f32s(0)},
		{"all absent gives zeros", Reduction{Inputs: make([][]byte, 2), Absent: []bool{true, true}, Count: 2, Op: Avg}, f32s(0, 0)},
		{"an absent rank's NaN is not read", Reduction{Inputs: [][]byte{f32s(1), f32s(float32(math.NaN()))}, Absent: []bool{false, true}}, f32s(1)},
		{"NaNs are canonical", Reduction{Inputs: [][]byte{f32s(inf, math.Float32frombits(0xFFC12345)), f32s(-inf, 1)}}, f32s(canonical, canonical)},
		{"a NaN in the low half survives a BF16 wire", Reduction{Wire: BF16, Inputs: [][]byte{f32s(math.Float32frombits(0x7F800001)), f32s(1)}}, f32s(canonical)},
		{"no flush to zero", Reduction{Inputs: [][]byte{f32s(math.Float32frombits(1)), f32s(math.Float32frombits(2))}}, f32s(math.Float32frombits(3))},
		{"rank order, in F32", Reduction{Inputs: [][]byte{f32s(1 << 24), f32s(1), f32s(1)}}, f32s(1 << 24)},
		{"rank order matters", Reduction{Inputs: [][]byte{f32s(1), f32s(1), f32s(1 << 24)}}, f32s(1<<24 + 2)},
		{"avg counts absent ranks", Reduction{Op: Avg, Inputs: [][]byte{f32s(3), nil, f32s(3), nil}, Absent: []bool{false, true, false, true}}, f32s(1.5)},
		{"avg by 3", Reduction{Op: Avg, Inputs: [][]byte{f32s(1), f32s(0), f32s(0)}}, f32s(float32(1) / 3)},
		{"the own part goes through the wire too", Reduction{Wire: BF16, Inputs: [][]byte{f32s(1 + 0x1p-9), f32s(0)}}, f32s(1)},
		{"two ranks keep the F32 sum", Reduction{Wire: BF16, Inputs: [][]byte{f32s(256), f32s(1)}}, f32s(257)},
		{"three ranks round it to the wire", Reduction{Wire: BF16, Inputs: [][]byte{f32s(256), f32s(1), f32s(0)}}, f32s(256)},
		{"three ranks, exact wire", Reduction{Wire: F32, Inputs: [][]byte{f32s(256), f32s(1), f32s(0)}}, f32s(257)},
		{"three ranks round the quotient, not the sum", Reduction{Wire: BF16, Op: Avg, Inputs: [][]byte{f32s(256), f32s(128), f32s(1)}}, f32s(128)},
		{"two ranks keep the quotient", Reduction{Wire: BF16, Op: Avg, Inputs: [][]byte{f32s(256), f32s(1)}}, f32s(128.5)},
		{"an F16 wire overflows", Reduction{Wire: F16, Inputs: [][]byte{f32s(65520, 65519), f32s(0, 0)}}, f32s(inf, 65504)},
		{"a BF16 payload is rounded once", Reduction{Type: BF16, Wire: BF16, Inputs: [][]byte{u16s(0x4380), u16s(0x3F80), u16s(0x3F80)}}, u16s(0x4381)},
		{"a BF16 NaN is canonical", Reduction{Type: BF16, Wire: BF16, Inputs: [][]byte{u16s(0xFFC0), u16s(0)}}, u16s(0x7FFF)},
		{"an F16 sum overflows at the end only", Reduction{Type: F16, Wire: F16, Inputs: [][]byte{u16s(0x7BFF), u16s(0x7BFF), u16s(0xFBFF)}}, u16s(0x7BFF)},
		{"an F16 average does not", Reduction{Type: F16, Wire: F16, Op: Avg, Inputs: [][]byte{u16s(0x7BFF), u16s(0x7BFF)}}, u16s(0x7BFF)},
		{"one rank is a copy, NaN payload and all", Reduction{Wire: BF16, Inputs: [][]byte{f32s(math.Float32frombits(0xFF800001))}}, f32s(math.Float32frombits(0xFF800001))},
		{"one absent rank gives zeros", Reduction{Inputs: [][]byte{nil}, Absent: []bool{true}, Count: 1}, f32s(0)},
		{"no elements", Reduction{Inputs: [][]byte{{}, {}}}, []byte{}},
	} {
		assert.Equal(t, c.want, result(t, c.r), c.name)
	}
}

func TestRefused(t *testing.T) {
	for _, r := range []Reduction{
		{}, {Type: 3, Inputs: [][]byte{{}}}, {Wire: 9, Inputs: [][]byte{{}}}, {Op: 2, Inputs: [][]byte{{}}},
		{Type: F16, Wire: BF16, Inputs: [][]byte{{}}}, {Inputs: [][]byte{{}, make([]byte, 4)}}, {Inputs: [][]byte{make([]byte, 3)}},
		{Inputs: [][]byte{{}}, Absent: []bool{true, false}}, {Inputs: [][]byte{make([]byte, 8)}, Count: 1},
	} {
		_, err := r.Result()
		assert.Error(t, err, "%+v", r)
	}
}

// Another way to the same bits: one element at a time, sums by exact arithmetic rounded to F32.
func slow(r Reduction, i int) uint32 {
	size := r.Type.Size()
	element := func(b []byte, t Type) float32 {
		switch t {
		case F16:
			return float16.Frombits(binary.LittleEndian.Uint16(b)).Float32()
		case BF16:
			return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)
		}
		return math.Float32frombits(binary.LittleEndian.Uint32(b))
	}
	through := func(f float32, t Type) float32 {
		switch {
		case nan(f) || t == F32:
			return f
		case t == F16:
			return float16.Fromfloat32(f).Float32()
		}
		return math.Float32frombits(uint32(nearestBF16(f)) << 16)
	}
	exact := func(f float32) bool { return !nan(f) && !math.IsInf(float64(f), 0) && f != 0 }
	var sum float32
	for rank, input := range r.Inputs {
		var value float32
		if r.Absent == nil || !r.Absent[rank] {
			value = through(element(input[i*size:], r.Type), r.Wire)
		}
		switch {
		case rank == 0:
			sum = value
		case exact(sum) && exact(value) && sum != -value:
			total := new(big.Float).SetPrec(400).Add(big.NewFloat(float64(sum)), big.NewFloat(float64(value)))
			sum, _ = total.Float32()
		default:
			sum += value
		}
	}
	if n := len(r.Inputs); r.Op == Avg {
		sum = float32(float64(sum) / float64(n)) // 53 bits are more than twice 24 and 2: rounding twice is harmless
	}
	if len(r.Inputs) >= 3 {
		sum = through(sum, r.Wire)
	}
	switch {
	case nan(sum) && size == 4:
		return CanonicalNaN32
	case nan(sum):
		return CanonicalNaN16
	case r.Type == F16:
		return uint32(float16.Fromfloat32(sum).Bits())
	case r.Type == BF16:
		return uint32(nearestBF16(sum))
	}
	return math.Float32bits(sum)
}

func TestAgainstSlow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Reduction{Type: rapid.SampledFrom([]Type{F32, F16, BF16}).Draw(t, "type"), Op: Op(rapid.IntRange(0, 1).Draw(t, "op"))}
		r.Wire = r.Type
		if r.Type == F32 {
			r.Wire = rapid.SampledFrom([]Type{F32, F16, BF16}).Draw(t, "wire")
		}
		ranks, count := rapid.IntRange(2, 8).Draw(t, "ranks"), rapid.SampledFrom([]int{1, 3, block, block + 1, 3*block + 7}).Draw(t, "count")
		kind, seed := Kind(rapid.IntRange(0, 2).Draw(t, "kind")), rapid.Uint64().Draw(t, "seed")
		r.Absent = make([]bool, ranks)
		for rank := range ranks {
			input := make([]byte, count*r.Type.Size())
			Fill(input, kind, r.Type, seed, rank)
			r.Inputs = append(r.Inputs, input)
			r.Absent[rank] = rank != seedRank(seed, ranks) && rapid.IntRange(0, 3).Draw(t, "absent") == 0
		}
		out := result(t, r)
		for i := range count {
			got := uint32(0)
			if r.Type.Size() == 4 {
				got = binary.LittleEndian.Uint32(out[4*i:])
			} else {
				got = uint32(binary.LittleEndian.Uint16(out[2*i:]))
			}
			if want := slow(r, i); got != want {
				t.Fatalf("element %d is %08x, not %08x", i, got, want)
			}
		}
	})
}

// seedRank is a rank that is never absent.
func seedRank(seed uint64, ranks int) int { return int(seed % uint64(ranks)) }

func TestFill(t *testing.T) {
	for kind := range Kind(len(kindNames)) {
		back, err := ParseKind(kind.String())
		require.NoError(t, err)
		require.Equal(t, kind, back)
		for _, typ := range []Type{F32, F16, BF16} {
			fillOf := func(count int, seed uint64, rank int) []byte {
				b := make([]byte, count*typ.Size())
				Fill(b, kind, typ, seed, rank)
				return b
			}
			long := fillOf(3*block+5, 7, 1)
			assert.Equal(t, long[:block*typ.Size()], fillOf(block, 7, 1), "an element depends on its index alone")
			assert.NotEqual(t, long, fillOf(3*block+5, 8, 1), "seed")
			assert.NotEqual(t, long, fillOf(3*block+5, 7, 0), "rank")
			assert.Empty(t, fillOf(0, 7, 1))

			var sum, squares float64
			const count = 100_000
			values := make([]float32, count)
			load(values, fillOf(count, 3, 0), typ)
			seen := map[string]bool{}
			for _, v := range values {
				sum += float64(v)
				squares += float64(v) * float64(v)
				switch bits := math.Float32bits(v); {
				case nan(v):
					seen["nan"] = true
				case math.IsInf(float64(v), 0):
					seen["infinity"] = true
				case bits == 1<<31:
					seen["-0"] = true
				case kind == Integers:
					require.True(t, v == float32(int(v)) && v >= -15 && v <= 15)
				}
			}
			switch kind {
			case Normal:
				assert.InDelta(t, 0, sum/count, 0.02)
				assert.InDelta(t, 1, math.Sqrt(squares/count), 0.02)
			case Integers:
				assert.InDelta(t, 0, sum/count, 0.2)
			case Specials:
				assert.Len(t, seen, 3)
			}
		}
	}
	_, err := ParseKind("random")
	assert.ErrorContains(t, err, "integers")
	assert.Panics(t, func() { Fill(nil, Normal, 5, 0, 0) })
}

// Integers are exact on every wire: what two ranks or eight give does not depend on it.
func TestIntegersAreExact(t *testing.T) {
	for ranks := 2; ranks <= 8; ranks++ {
		var inputs [][]byte
		for rank := range ranks {
			b := make([]byte, 4*5000)
			Fill(b, Integers, F32, 1, rank)
			inputs = append(inputs, b)
		}
		exact := result(t, Reduction{Inputs: inputs})
		for _, wire := range []Type{F16, BF16} {
			assert.True(t, bytes.Equal(exact, result(t, Reduction{Wire: wire, Inputs: inputs})))
		}
	}
}

func TestDifferent(t *testing.T) {
	a := f32s(1, 2, 3)
	for _, c := range []struct {
		b            []byte
		count, first int
	}{{f32s(1, 2, 3), 0, -1}, {f32s(1, 5, 4), 2, 1}, {f32s(1, 2), 1, 2}, {nil, 3, 0}, {f32s(1, 2, 3, 4), 1, 3}} {
		count, first := Different(a, c.b, F32)
		assert.Equal(t, [2]int{c.count, c.first}, [2]int{count, first})
	}
	count, first := Different(f32s(0), f32s(float32(math.Copysign(0, -1))), F32)
	assert.Equal(t, [2]int{1, 0}, [2]int{count, first}, "bits, not values")
}

func Benchmark64MiB(b *testing.B) {
	inputs := [][]byte{make([]byte, 64<<20), make([]byte, 64<<20)}
	for _, wire := range []Type{F32, BF16, F16} {
		b.Run(map[Type]string{F32: "f32", BF16: "bf16", F16: "f16"}[wire], func(b *testing.B) {
			b.SetBytes(64 << 20)
			for rank := range inputs {
				Fill(inputs[rank], Normal, F32, 1, rank)
			}
			for b.Loop() {
				_, _ = Reduction{Wire: wire, Inputs: inputs}.Result()
			}
		})
	}
	b.Run("fill", func(b *testing.B) {
		b.SetBytes(64 << 20)
		for b.Loop() {
			Fill(inputs[0], Normal, F32, 1, 0)
		}
	})
	b.Run("fill specials", func(b *testing.B) {
		b.SetBytes(64 << 20)
		for b.Loop() {
			Fill(inputs[0], Specials, F32, 1, 0)
		}
	})
	b.Run("different", func(b *testing.B) {
		b.SetBytes(64 << 20)
		for b.Loop() {
			Different(inputs[0], inputs[1], F32)
		}
	})
}
