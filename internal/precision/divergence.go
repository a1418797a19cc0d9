package precision

import "math"

// KL says how far predictions are from those with F32 reductions: the Kullback-Leibler divergence per position, in nats.
type KL struct {
	Mean    float64 `json:"kl_mean"`
	StdErr  float64 `json:"kl_stderr"` // of the mean, positions taken as independent
	Max     float64 `json:"kl_max"`
	SameTop float64 `json:"same_top"` // share of the positions whose likeliest token is the same, 0 to 1
}

// Compare takes logits [position][token]; base has the exact ones.
func Compare(base, other []float32, vocab int) KL {
	var out KL
	n := float64(len(base) / vocab)
	squares := 0.0
	for from := 0; from < len(base); from += vocab {
		b, o := base[from:from+vocab], other[from:from+vocab]
		kl := divergenceOf(b, o)
		out.Mean += kl
		squares += kl * kl
		out.Max = max(out.Max, kl)
		if top(b) == top(o) {
			out.SameTop++
		}
	}
	out.Mean /= n
	out.SameTop /= n
	if n > 1 {
		out.StdErr = math.Sqrt(max(0, squares/n-out.Mean*out.Mean) / (n - 1))
	}
	out.Mean, out.StdErr, out.Max = finite(out.Mean), finite(out.StdErr), finite(out.Max)
	return out
}

// divergenceOf is the sum over the tokens of p (log p - log q). It cannot be negative: what rounding leaves below 0 is 0.
func divergenceOf(base, other []float32) float64 {
	zeroP, zeroQ := logTotal(base), logTotal(other)
	kl := 0.0
	for i := range base {
		logP, logQ := float64(base[i])-zeroP, float64(other[i])-zeroQ
		kl += math.Exp(logP) * (logP - logQ)
	}
	return max(0, kl)
}

// logTotal is the logarithm of the sum of the exponentials.
func logTotal(logits []float32) float64 {
	most := float64(logits[top(logits)])
	total := 0.0
	for _, x := range logits {
		total += math.Exp(float64(x) - most)
	}
	return most + math.Log(total)
}

// top is the first of the largest.
func top(logits []float32) int {
	best := 0
	for i, x := range logits {
		if x > logits[best] {
			best = i
		}
	}
	return best
}

// describe fills in what the base's predictions look like.
func (m *ModelInfo) describe(logits []float32) {
	n := float64(len(logits) / m.Vocab)
	squares := 0.0
	for from := 0; from < len(logits); from += m.Vocab {
		part := logits[from : from+m.Vocab]
		zero := logTotal(part)
		for _, x := range part {
			squares += float64(x) * float64(x)
			logP := float64(x) - zero
			m.Entropy -= math.Exp(logP) * logP / n
		}
		m.TopProbability += math.Exp(float64(part[top(part)])-zero) / n
	}
	m.LogitDeviation = math.Sqrt(squares / float64(len(logits)))
}
