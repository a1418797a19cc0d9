package reference

import "math"

// The NaNs every result is stored as, on every platform.
const (
	CanonicalNaN32 = 0x7FFFFFFF // F32
	CanonicalNaN16 = 0x7FFF     // F16 and BF16
)

// BF16ToF32 widens a BF16, exactly.
func BF16ToF32(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// F32ToBF16 rounds to nearest even; what rounds beyond the largest finite value becomes infinite, NaN becomes 7FFF.
func F32ToBF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if bits&0x7FFFFFFF > 0x7F800000 {
		return CanonicalNaN16
	}
	// Half an ulp less one, plus the kept part's lowest bit: ties go to even. A carry out of the mantissa enters the
	// exponent, which is right up to and including infinity.
	return uint16((bits + 0x7FFF + bits>>16&1) >> 16)
}

// F16ToF32 widens an F16, exactly; subnormals become normal.
func F16ToF32(h uint16) float32 { return f16Values[h] }

// f16Values: a table is three times faster than branches, and 256 KiB stay in the L2 cache.
var f16Values = func() (values [1 << 16]float32) {
	for i := range values {
		values[i] = widenF16(uint16(i))
	}
	return values
}()

func widenF16(h uint16) float32 {
	sign, exponent, mantissa := uint32(h>>15)<<31, uint32(h>>10&0x1F), uint32(h&0x3FF)
	switch exponent {
	case 0: // zero and subnormals: mantissa * 2^-24, which F32 holds exactly
		value := float32(mantissa) * 0x1p-24
		return math.Float32frombits(math.Float32bits(value) | sign)
	case 0x1F: // infinity and NaN keep their payload
		return math.Float32frombits(sign | 0x7F800000 | mantissa<<13)
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | mantissa<<13)
}

// F32ToF16 rounds to nearest even, into subnormals where the value is small; what rounds beyond 65504 becomes
// infinite, NaN becomes 7FFF.
func F32ToF16(f float32) uint16 {
	bits := math.Float32bits(f)
	sign, magnitude := uint16(bits>>16&0x8000), bits&0x7FFFFFFF
	switch {
	case magnitude > 0x7F800000:
		return CanonicalNaN16
	case magnitude >= 0x477FF000: // 65520, half way from 65504 to 65536, which is even
		return sign | 0x7C00
	case magnitude >= 0x38800000: // 2^-14, the smallest normal: rebias, then round away 13 bits
		rebased := magnitude - (127-15)<<23
		return sign | uint16((rebased+0xFFF+rebased>>13&1)>>13)
	case magnitude < 0x33000000: // below 2^-25, half the smallest subnormal
		return sign
	}
	// Subnormal: the result counts units of 2^-24. The mantissa with its implicit bit has the unit 2^(e-150).
	shift := 126 - magnitude>>23 // 14 (2^-14 not reached) to 24
	mantissa := magnitude&0x7FFFFF | 0x800000
	half := uint32(1) << (shift - 1)
	return sign | uint16((mantissa+half-1+mantissa>>shift&1)>>shift)
}
