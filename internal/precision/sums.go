package precision

import (
	"math"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

// Errors is the error of a sum against float64, absolute and in units in the last place: the ulp of the wire's type at
// the exact sum, so a BF16 ulp is 65536 F32 ulps.
type Errors struct {
	Max     float64 `json:"max"`
	Mean    float64 `json:"mean"`
	RMS     float64 `json:"rms"`
	MaxULP  float64 `json:"max_ulp"`
	MeanULP float64 `json:"mean_ulp"`
	RMSULP  float64 `json:"rms_ulp"`
}

// Measure compares a sum with the exact one.
func Measure(got []float32, exact []float64, wire allreduce.Type) Errors {
	var e Errors
	for i, want := range exact {
		err := math.Abs(float64(got[i]) - want)
		ulps := err / ulp(want, wire)
		e.Max, e.MaxULP = max(e.Max, err), max(e.MaxULP, ulps) // max keeps a NaN
		e.Mean, e.MeanULP = e.Mean+err, e.MeanULP+ulps
		e.RMS, e.RMSULP = e.RMS+err*err, e.RMSULP+ulps*ulps
	}
	n := float64(max(len(exact), 1))
	return Errors{finite(e.Max), finite(e.Mean / n), finite(math.Sqrt(e.RMS / n)),
		finite(e.MaxULP), finite(e.MeanULP / n), finite(math.Sqrt(e.RMSULP / n))}
}

// ulp is the distance of the numbers of a type around x: F32 and BF16 have the same exponents.
func ulp(x float64, t allreduce.Type) float64 {
	const smallest = -126 // exponent of the smallest normal number
	fraction := 23        // bits
	if t == allreduce.BF16 {
		fraction = 7
	}
	exponent := smallest
	if x != 0 {
		exponent = max(math.Ilogb(x), smallest)
	}
	return math.Ldexp(1, exponent-fraction)
}

// NCCLSum is what ncclAllReduce gives for F32 payloads on an F32 wire, or on a BF16 wire between a conversion to BF16
// and one back. Every addition rounds to the wire's type, to nearest even; devices that add BF16 in F32 and then round
// give the same, since F32 has more than twice BF16's precision and two bits more. With two ranks there is one addition,
// so this is exact, whatever NCCL's algorithm. With more it is Ring on one channel: part c of the elements starts at rank
// c+1 and goes around.
func NCCLSum(inputs [][]float32, wire allreduce.Type) []float32 {
	round := func(x float32) float32 { return x }
	if wire == allreduce.BF16 {
		round = func(x float32) float32 { return reference.BF16ToF32(reference.F32ToBF16(x)) }
	}
	ranks, count := len(inputs), len(inputs[0])
	out := make([]float32, count)
	for part := range ranks {
		from, to := part*count/ranks, (part+1)*count/ranks
		for step := range ranks {
			input := inputs[(part+1+step)%ranks]
			for i := from; i < to; i++ {
				if step == 0 {
					out[i] = round(input[i])
				} else {
					out[i] = round(out[i] + round(input[i]))
				}
			}
		}
	}
	return out
}

// referenceSum is what our paths must give.
func referenceSum(inputs [][]float32, wire allreduce.Type) ([]float32, error) {
	r := reference.Reduction{Type: reference.F32, Wire: reference.Type(wire), Op: reference.Sum}
	for _, input := range inputs {
		r.Inputs = append(r.Inputs, device.Bytes(input))
	}
	result, err := r.Result()
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(inputs[0]))
	copy(device.Bytes(out), result)
	return out, nil
}
