package allreduce_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

const patterns = 1 << 16

// halves are all 65536 values of F16 or BF16 as of(i) orders them.
func halves(of func(i uint16) uint16) []byte {
	out := make([]byte, 0, 2*patterns)
	for i := range patterns {
		out = binary.LittleEndian.AppendUint16(out, of(uint16(i)))
	}
	return out
}

// aroundHalves are F32 values that show how a wire rounds: all of its values, the ties between each and the next, and what is a
// bit below and above a tie, as of(i) orders them.
func aroundHalves(wire allreduce.Type, of func(i uint16) uint16) []byte {
	widen := reference.BF16ToF32
	if wire == allreduce.F16 {
		widen = reference.F16ToF32
	}
	var out []byte
	for i := range patterns {
		h := of(uint16(i))
		here := widen(h)
		tie := here
		if next := widen(h + 1); h&0x7FFF != 0x7FFF && !math.IsInf(float64(here), 0) && next == next {
			tie = float32((float64(here) + float64(next)) / 2)
			if math.IsInf(float64(next), 0) { // half an ulp beyond the largest
				tie = here + (here-widen(h-1))/2
			}
		}
		bits := math.Float32bits(tie)
		for _, b := range []uint32{math.Float32bits(here), bits - 1, bits, bits + 1} {
			out = binary.LittleEndian.AppendUint32(out, b)
		}
	}
	return out
}

func same(i uint16) uint16      { return i }
func negative(i uint16) uint16  { return i ^ 0x8000 }
func minusZero(uint16) uint16   { return 0x8000 }
func scrambled(i uint16) uint16 { return i*40503 + 12345 }

// ownPaths are those of ours that two devices can have. Emulated ones get peer access.
func ownPaths(t *testing.T, d device.Driver) []allreduce.Algorithm {
	t.Helper()
	if d.Backend() == device.Emulated {
		require.NoError(t, device.Configure(peersMachine(2), true))
	}
	list := []allreduce.Algorithm{allreduce.AlgorithmInternal, allreduce.AlgorithmCopyEngine}
	if can, err := d.CanAccessPeer(0, 1); err == nil && can {
		list = append(list, allreduce.AlgorithmPeer)
	}
	return list
}

// Every value of F16 and BF16 as payload, and every value and tie of the wires as F32 payload: added to -0, to itself, to its
// negative and to any other, sum and average, on every path, with two ranks and with three.
func TestEveryValue(t *testing.T) {
	partners := []struct {
		name string
		of   func(uint16) uint16
	}{{"-0", minusZero}, {"itself", same}, {"its negative", negative}, {"another", scrambled}}
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, path := range ownPaths(t, d) {
			for _, ranks := range []int{2, 3} {
				for _, wire := range []allreduce.Type{allreduce.F16, allreduce.BF16} {
					choice := map[allreduce.Type]allreduce.WireChoice{allreduce.F16: allreduce.WireF16, allreduce.BF16: allreduce.WireBF16}[wire]
					r := newRig(t, d, allreduce.Config{Algorithm: path, Wire: choice, P2P: allreduce.P2PTrust, Devices: []int{0, 1, 0}[:ranks]})
					for _, typ := range []allreduce.Type{wire, allreduce.F32} {
						values := halves
						if typ == allreduce.F32 {
							values = func(of func(uint16) uint16) []byte { return aroundHalves(wire, of) }
						}
						for i, partner := range partners {
							if ranks == 3 && i%2 == 0 { // time; the third rank adds -0
								continue
							}
							for _, op := range []allreduce.Op{allreduce.Sum, allreduce.Avg} {
								j := job{typ: typ, op: op, data: [][]byte{values(same), values(partner.of), values(minusZero)}[:ranks]}
								if ranks == 3 && path != allreduce.AlgorithmInternal { // two-shot begins at 1.1 MB on the wire
									for rank, data := range j.data {
										j.data[rank] = bytes.Repeat(data, 3<<19/(len(data)/typ.Size()*wire.Size()))
									}
								}
								j.count = len(j.data[0]) / typ.Size()
								p := r.run(j)
								require.Equal(t, wire, p.wire)
								if typ == wire && partner.name == "-0" && op == allreduce.Sum {
									requireKept(t, typ, p)
								}
							}
						}
					}
				}
			}
		}
	})
}

// requireKept: x + -0 is x, bit for bit, subnormals and -0 too; of NaNs one is left. Said without the reference.
func requireKept(t *testing.T, typ allreduce.Type, p *prepared) {
	t.Helper()
	infinity := map[allreduce.Type]uint16{allreduce.F16: 0x7C00, allreduce.BF16: 0x7F80}[typ]
	for i := range patterns {
		want := uint16(i)
		if want&0x7FFF > infinity {
			want = 0x7FFF
		}
		require.Equal(t, want, binary.LittleEndian.Uint16(p.want[2*i:]), "%s %04x", typ, i)
	}
}

// The rules of docs/precision.md for values at the edges, one by one, said without the reference.
func TestEdgesOfValues(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	const most = math.MaxFloat32
	cases := []struct {
		typ  allreduce.Type
		wire allreduce.WireChoice
		in   []float64
		want uint32
		why  string
	}{
		{allreduce.F32, allreduce.WireF32, []float64{nan, 1}, 0x7FFFFFFF, "any NaN is 7FFFFFFF"},
		{allreduce.F32, allreduce.WireF32, []float64{inf, -inf}, 0x7FFFFFFF, "Inf - Inf"},
		{allreduce.F32, allreduce.WireF32, []float64{inf, -most}, 0x7F800000, "Inf stays"},
		{allreduce.F32, allreduce.WireF32, []float64{most, most}, 0x7F800000, "overflow of the sum"},
		{allreduce.F32, allreduce.WireF32, []float64{0x1p-149, 0x1p-149}, 2, "subnormals are kept"},
		{allreduce.F32, allreduce.WireF32, []float64{math.Copysign(0, -1), math.Copysign(0, -1)}, 0x80000000, "the sum does not start with +0"},
		{allreduce.F32, allreduce.WireF32, []float64{1, -1}, 0, "x - x is +0"},
		{allreduce.F32, allreduce.WireF16, []float64{65519, 0}, 0x477FE000, "rounds to 65504, the largest F16"},
		{allreduce.F32, allreduce.WireF16, []float64{65520, 0}, 0x7F800000, "a tie above the largest F16 is Inf"},
		{allreduce.F32, allreduce.WireF16, []float64{65504, 65504}, 0x47FFE000, "two ranks: the sum stays F32"},
		{allreduce.F32, allreduce.WireF16, []float64{65504, 65504, 0}, 0x7F800000, "three: it is rounded to the wire"},
		{allreduce.F32, allreduce.WireF16, []float64{0x1p-25, 0}, 0, "a tie with 0 is even"},
		{allreduce.F32, allreduce.WireF16, []float64{0x1.8p-25, 0}, 0x33800000, "an F16 subnormal, 2^-24"},
		{allreduce.F32, allreduce.WireBF16, []float64{most, 0}, 0x7F800000, "above the largest BF16"},
		{allreduce.F32, allreduce.WireBF16, []float64{0x1.01p0, 0}, 0x3F800000, "a tie goes to even: down"},
		{allreduce.F32, allreduce.WireBF16, []float64{0x1.03p0, 0}, 0x3F820000, "a tie goes to even: up"},
		{allreduce.F16, allreduce.WireAuto, []float64{65504, 16}, 0x7C00, "F16 payload: the sum is rounded once"},
		{allreduce.F16, allreduce.WireAuto, []float64{65504, 16, -16}, 0x7BFF, "the sum on the way is F32"},
		{allreduce.F16, allreduce.WireAuto, []float64{0x1p-24, 0x1p-24}, 2, "F16 subnormals"},
		{allreduce.F16, allreduce.WireAuto, []float64{-nan, 1}, 0x7FFF, "any NaN is 7FFF"},
		{allreduce.BF16, allreduce.WireAuto, []float64{0x1p-133, 0x1p-133}, 2, "BF16 subnormals"},
		{allreduce.BF16, allreduce.WireAuto, []float64{256, 1, -1}, 0x4380, "the sum on the way is F32"},
		{allreduce.BF16, allreduce.WireAuto, []float64{nan, inf}, 0x7FFF, "any NaN is 7FFF"},
	}
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, path := range ownPaths(t, d) {
			for _, c := range cases {
				r := newRig(t, d, allreduce.Config{Algorithm: path, Wire: c.wire, P2P: allreduce.P2PTrust, Devices: []int{0, 1, 0}[:len(c.in)]})
				j := job{typ: c.typ, count: 1}
				for _, v := range c.in {
					j.data = append(j.data, encoded(c.typ, float32(v)))
				}
				got := make([]byte, 4)
				copy(got, r.run(j).want)
				require.Equal(t, fmt.Sprintf("%08x", c.want), fmt.Sprintf("%08x", binary.LittleEndian.Uint32(got)), "%v as %s: %s", c.in, c.typ, c.why)
			}
		}
	})
}

func encoded(t allreduce.Type, v float32) []byte {
	switch t {
	case allreduce.F16:
		return binary.LittleEndian.AppendUint16(nil, reference.F32ToF16(v))
	case allreduce.BF16:
		return binary.LittleEndian.AppendUint16(nil, reference.F32ToBF16(v))
	}
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(v))
}
