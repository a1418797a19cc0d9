package precision

import (
	"math"
	"math/rand/v2"
)

// Distribution is what the inputs of the error rows are drawn from.
type Distribution int

// The distributions.
const (
	Normal      Distribution = iota // mean 0, deviation 1
	HeavyTailed                     // Student's t with 5 degrees of freedom: one value in 10^6 is beyond 19 deviations
	Cancelling                      // normal, but one rank's value nearly cancels the others': their sum is 2^-10 to 1
)

// Distributions lists them all.
var Distributions = []Distribution{Normal, HeavyTailed, Cancelling}

// String gives "normal", "heavy-tailed" or "cancelling".
func (d Distribution) String() string {
	return [...]string{"normal", "heavy-tailed", "cancelling"}[d]
}

// freedom is Student's t's parameter: heavy tails, but with a fourth moment. Without one the RMS error over 10^6 elements
// hangs on the few largest, and comparing two of them to 1 % is chance.
const freedom = 5

// Inputs draws the elements of every rank; the same arguments give the same inputs.
func Inputs(d Distribution, seed uint64, ranks, count int) [][]float32 {
	random := rand.New(rand.NewPCG(seed, uint64(d)+1))
	inputs := make([][]float32, ranks)
	for rank := range inputs {
		inputs[rank] = make([]float32, count)
	}
	for i := range count {
		total := 0.0
		for _, input := range inputs {
			value := random.NormFloat64()
			if d == HeavyTailed {
				squares := 0.0
				for range freedom {
					x := random.NormFloat64()
					squares += x * x
				}
				value /= math.Sqrt(squares / freedom)
			}
			input[i] = float32(value)
			total += float64(input[i])
		}
		if d == Cancelling {
			// Any rank, so that no order of additions is favoured.
			input := inputs[random.IntN(ranks)]
			left := math.Ldexp(1+random.Float64(), -1-random.IntN(10)) // 2^-10 to 1
			if random.IntN(2) == 0 {
				left = -left
			}
			input[i] = float32(float64(input[i]) - total + left)
		}
	}
	return inputs
}

// Exact adds in float64. Its own error is 2^-29 of an F32 rounding.
func Exact(inputs [][]float32) []float64 {
	exact := make([]float64, len(inputs[0]))
	for _, input := range inputs {
		for i, x := range input {
			exact[i] += float64(x)
		}
	}
	return exact
}
