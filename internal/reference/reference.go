// Package reference computes what an all-reduce must give, on the CPU, in plain Go. It is the measure every path is
// compared with bit for bit, so it imports nothing of this module and shares no code with the kernels.
//
// The rules (docs/precision.md):
//   - every rank's values, the own ones too, are rounded to the wire type, to nearest even;
//   - the sum starts with rank 0's value, not with 0, and goes in rank order, in F32; an absent rank adds +0;
//   - avg is the sum divided by the number of ranks, absent ones counted;
//   - N >= 3 ranks and a wire narrower than the payload: the sum (quotient) is rounded once to the wire, since that is
//     what the all-gather carries; with two ranks it stays F32;
//   - the result is rounded once to the payload type, and any NaN is stored as 7FFFFFFF or 7FFF;
//   - one rank: a bit-for-bit copy.
package reference

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"
)

// Type is an element type, numbered as in the C API.
type Type int32

// The element types the paths of ours serve.
const (
	F32  Type = 0
	F16  Type = 1
	BF16 Type = 2
)

// Size is the number of bytes of an element; 0 for an unknown type.
func (t Type) Size() int {
	switch t {
	case F32:
		return 4
	case F16, BF16:
		return 2
	}
	return 0
}

// Op is an operation, numbered as in the C API.
type Op int32

// The operations.
const (
	Sum Op = 0
	Avg Op = 1
)

// Reduction is a question: what do these inputs give?
type Reduction struct {
	Type   Type     // of the inputs and of the result
	Wire   Type     // what travels: F32, F16 or BF16 for F32, else Type itself
	Op     Op       //
	Inputs [][]byte // [rank] little-endian elements, equally long; not looked at where absent
	Absent []bool   // [rank]; nil: none is absent
	Count  int      // elements; needed only if every rank is absent, else 0 or the inputs' own
}

// block is how many elements one pass works on: two rows of it stay in the L1 cache.
const block = 2048

// Result gives the bytes every rank must end with.
func (r Reduction) Result() ([]byte, error) {
	count, err := r.check()
	if err != nil {
		return nil, err
	}
	out := make([]byte, count*r.Type.Size())
	if len(r.Inputs) == 1 {
		if !r.absent(0) {
			copy(out, r.Inputs[0])
		}
		return out, nil
	}
	workers := min(runtime.GOMAXPROCS(0), (count+block-1)/block)
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			// Whole blocks each, so that no two workers share an element.
			blocks := (count + block - 1) / block
			r.run(out, w*blocks/workers*block, min((w+1)*blocks/workers*block, count))
		})
	}
	group.Wait()
	return out, nil
}

func (r Reduction) absent(rank int) bool { return r.Absent != nil && r.Absent[rank] }

func (r Reduction) check() (count int, err error) {
	size := r.Type.Size()
	switch {
	case size == 0 || r.Wire.Size() == 0:
		return 0, fmt.Errorf("reference: type %d with wire %d is not served", r.Type, r.Wire)
	case r.Type != F32 && r.Wire != r.Type:
		return 0, fmt.Errorf("reference: type %d travels as it is, not as %d", r.Type, r.Wire)
	case r.Op != Sum && r.Op != Avg:
		return 0, fmt.Errorf("reference: unknown operation %d", r.Op)
	case len(r.Inputs) == 0:
		return 0, fmt.Errorf("reference: no ranks")
	case r.Absent != nil && len(r.Absent) != len(r.Inputs):
		return 0, fmt.Errorf("reference: %d inputs, %d absent marks", len(r.Inputs), len(r.Absent))
	}
	count = -1
	if r.Count > 0 {
		count = r.Count
	}
	for rank, input := range r.Inputs {
		if r.absent(rank) {
			continue
		}
		if count < 0 {
			count = len(input) / size
		}
		if len(input) != count*size {
			return 0, fmt.Errorf("reference: rank %d has %d bytes, not %d", rank, len(input), count*size)
		}
	}
	return max(count, 0), nil
}

// run reduces the elements from..to.
func (r Reduction) run(out []byte, from, to int) {
	size := r.Type.Size()
	narrow := len(r.Inputs) >= 3 && r.Wire.Size() < size
	var sums, values [block]float32
	for ; from < to; from += block {
		n := min(block, to-from)
		sum, value := sums[:n], values[:n]
		for rank, input := range r.Inputs {
			into := value
			if rank == 0 {
				into = sum // the sum starts with rank 0's value: 0 + -0 would be +0
			}
			if r.absent(rank) {
				clear(into)
			} else {
				load(into, input[from*size:], r.Type)
				round(into, r.Wire)
			}
			if rank > 0 {
				for i, v := range value {
					sum[i] += v
				}
			}
		}
		if r.Op == Avg {
			ranks := float32(len(r.Inputs))
			for i := range sum {
				sum[i] /= ranks
			}
		}
		if narrow {
			round(sum, r.Wire)
		}
		store(out[from*size:], sum, r.Type)
	}
}

// load widens elements of type t, exactly.
func load(to []float32, from []byte, t Type) {
	switch t {
	case F32:
		from = from[:4*len(to)]
		for i := range to {
			to[i] = math.Float32frombits(binary.LittleEndian.Uint32(from[4*i:]))
		}
	case F16:
		from = from[:2*len(to)]
		for i := range to {
			to[i] = F16ToF32(binary.LittleEndian.Uint16(from[2*i:]))
		}
	case BF16:
		from = from[:2*len(to)]
		for i := range to {
			to[i] = BF16ToF32(binary.LittleEndian.Uint16(from[2*i:]))
		}
	}
}

// round makes every value one the type can hold.
func round(values []float32, t Type) {
	switch t {
	case F16:
		for i, v := range values {
			values[i] = F16ToF32(F32ToF16(v))
		}
	case BF16:
		for i, v := range values {
			values[i] = BF16ToF32(F32ToBF16(v))
		}
	}
}

// store rounds to the payload type, with canonical NaNs.
func store(to []byte, from []float32, t Type) {
	switch t {
	case F32:
		to = to[:4*len(from)]
		for i, v := range from {
			bits := math.Float32bits(v)
			if v != v {
				bits = CanonicalNaN32
			}
			binary.LittleEndian.PutUint32(to[4*i:], bits)
		}
	case F16:
		to = to[:2*len(from)]
		for i, v := range from {
			binary.LittleEndian.PutUint16(to[2*i:], F32ToF16(v))
		}
	case BF16:
		to = to[:2*len(from)]
		for i, v := range from {
			binary.LittleEndian.PutUint16(to[2*i:], F32ToBF16(v))
		}
	}
}

// Different counts the elements whose bits differ and gives the index of the first, -1 where none does. A length that
// differs counts each missing element.
func Different(a, b []byte, t Type) (count, first int) {
	first = -1
	size := t.Size()
	common := min(len(a), len(b)) / size
	for i := range common {
		if string(a[i*size:(i+1)*size]) != string(b[i*size:(i+1)*size]) {
			if count == 0 {
				first = i
			}
			count++
		}
	}
	if missing := max(len(a), len(b))/size - common; missing > 0 {
		if count == 0 {
			first = common
		}
		count += missing
	}
	return count, first
}
