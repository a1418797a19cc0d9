package reference

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
)

// Kind is what inputs are made of.
type Kind int

// The kinds.
const (
	Normal   Kind = iota // mean 0, deviation 1: what activations look like
	Integers             // -15 to 15: the sum of 8 ranks is exact in any order and on any wire
	Specials             // half normal, half NaN, infinities, zeros of both signs, subnormals, ties, values that overflow
)

var kindNames = [...]string{"normal", "integers", "specials"}

// String gives "normal", "integers" or "specials".
func (k Kind) String() string {
	if k >= 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", int(k))
}

// ParseKind reads what String writes.
func ParseKind(name string) (Kind, error) {
	for i, known := range kindNames {
		if name == known {
			return Kind(i), nil
		}
	}
	return 0, fmt.Errorf("reference: %q is no kind of input; allowed: %s", name, strings.Join(kindNames[:], ", "))
}

// Fill writes elements of a type over to, whose length is a multiple of the element. Element i of a rank depends on
// kind, seed, rank and i alone, so any part of an input can be made again anywhere. It panics for a type it does not
// know: that is a mistake in the caller.
func Fill(to []byte, kind Kind, t Type, seed uint64, rank int) {
	size := t.Size()
	if size == 0 || kind < Normal || kind > Specials {
		panic(fmt.Sprintf("reference: no input of kind %d, type %d", kind, t))
	}
	count := len(to) / size
	key := mix(seed ^ mix(uint64(rank)+0x5851F42D4C957F2D))
	workers := min(runtime.GOMAXPROCS(0), count/block+1)
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() { fill(to, kind, t, key, w*count/workers, (w+1)*count/workers) })
	}
	group.Wait()
}

func fill(to []byte, kind Kind, t Type, key uint64, from, end int) {
	var values [block]float32
	size := t.Size()
	for ; from < end; from += block {
		part := values[:min(block, end-from)]
		for i := range part {
			random := mix(key + uint64(from+i)*0x9E3779B97F4A7C15)
			if kind == Integers {
				part[i] = float32(int(random>>32%31) - 15)
			} else {
				part[i] = normal(random)
			}
		}
		switch {
		case kind != Specials:
			store(to[from*size:], part, t)
		default:
			// The bits are stored as they are: a special NaN must arrive with its payload and sign.
			store(to[from*size:], part, t)
			list := specials(t)
			for i := range part {
				if random := mix(^key + uint64(from+i)*0x9E3779B97F4A7C15); random&1 == 0 {
					special := list[random>>1%uint64(len(list))]
					if size == 4 {
						binary.LittleEndian.PutUint32(to[(from+i)*4:], special)
					} else {
						binary.LittleEndian.PutUint16(to[(from+i)*2:], uint16(special))
					}
				}
			}
		}
	}
}

// mix is splitmix64's finaliser: a bijection whose every output bit depends on every input bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// normal adds four 16-bit parts: close enough to a normal distribution (tails end at 3.5), and many times faster than
// a logarithm per element. A fifth, small part fills the mantissa's low bits.
func normal(random uint64) float32 {
	sum := int64(random&0xFFFF) + int64(random>>16&0xFFFF) + int64(random>>32&0xFFFF) + int64(random>>48) - 2*0xFFFF
	const deviation = 37837.2 // sqrt(4/12) * 65536
	return float32((float64(sum) + float64(random*0x9E3779B97F4A7C15>>40)*0x1p-24) / deviation)
}

// specials lists bit patterns where implementations go wrong.
func specials(t Type) []uint32 {
	switch t {
	case F16:
		return f16Specials
	case BF16:
		return bf16Specials
	}
	return f32Specials
}

var (
	f16Specials = []uint32{
		0x7E00, 0xFE00, 0x7FFF, 0xFFFF, 0x7C01, 0xFD55, // NaNs: quiet, negative, full, signalling
		0x7C00, 0xFC00, 0x0000, 0x8000, // infinities and zeros
		0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, // subnormals to the smallest normal
		0x7BFF, 0xFBFF, 0x7BFE, 0x7800, // the largest: two of them overflow
		0x3C00, 0xBC00, 0x3C01, 0x1400, // 1, its neighbour, and half its ulp
	}
	bf16Specials = []uint32{
		0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0x7F81, 0xFFA5,
		0x7F80, 0xFF80, 0x0000, 0x8000,
		0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080,
		0x7F7F, 0xFF7F, 0x7F7E, 0x7F00,
		0x3F80, 0xBF80, 0x3F81, 0x3B80,
	}
	f32Specials = func() []uint32 {
		list := []uint32{
			0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFA55555, 0x7F80FFFF, // NaNs; some only in the low half
			0x7F800000, 0xFF800000, 0x00000000, 0x80000000,
			0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, // subnormals to the smallest normal
			0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, // the largest; the last rounds to infinity as BF16
			0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001, 0x3F807FFF, // BF16 ties and their neighbours
			0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, // the same for F16
			0x00008000, 0x00018000, 0x00007FFF, 0x80008000, // ties among BF16's subnormals
		}
		for _, f := range []float32{65504, 65519, 65520, 65536, -65520, 0x1p-24, 0x1p-25, -0x1p-25, 0x1.8p-25, 0x1.000002p-25, 0x1p-14, 0x1.ffep-15, 0x1.fffp-15, 1, -1} {
			list = append(list, math.Float32bits(f))
		}
		return list
	}()
)
