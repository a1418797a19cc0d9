package precision

import (
	"math"
	"math/rand/v2"
	"sync"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

// Shape is the size of the transformer. Width and FFN are multiples of 8, Width/Heads of 4, Heads is even: gonum's dot
// product adds in an order that depends on the alignment of its rows, and equal bits are wanted from run to run.
type Shape struct {
	Layers   int `json:"layers"`
	Width    int `json:"width"` // of the residual stream
	Heads    int `json:"heads"`
	FFN      int `json:"ffn"` // width of the feed-forward block, gate and up each
	Vocab    int `json:"vocab"`
	Sequence int `json:"sequence"` // positions that see each other; more tokens are more sequences
}

// DefaultShape takes about a second per 512 positions and pass on two cores.
var DefaultShape = Shape{Layers: 6, Width: 384, Heads: 6, FFN: 1024, Vocab: 4096, Sequence: 128}

// ModelInfo describes the transformer and how realistic its predictions are, with F32 reductions.
type ModelInfo struct {
	Shape
	LogitDeviation float64 `json:"logit_deviation"`
	Entropy        float64 `json:"entropy"`         // mean of the next token's, in nats
	TopProbability float64 `json:"top_probability"` // mean of the likeliest token's
}

// The gains of the random weights, over 1/sqrt(inputs). They make what trained models have: attention that looks at a
// few positions (scores of deviation 2), blocks that add about as much as the stream holds, and logits of deviation 3.5,
// whose entropy over 4096 tokens is two to three nats.
const (
	attentionGain = math.Sqrt2 // of queries and of keys
	blockGain     = 1.6        // of a block's last matrix, after which the reduction comes
	logitGain     = 3.5
	normSpread    = 0.3 // deviation of the logarithm of the norms' gains: some channels are louder
)

// Transformer is a decoder as today's models are (RMSNorm, rotary positions, causal attention, SwiGLU), with seeded
// random weights, split over two ranks: each has half of the heads and half of the feed-forward columns, and the
// partial results of each block are summed by an all-reduce. The stream, the norms and the logits are the same on both
// ranks, so they are computed once.
type Transformer struct {
	shape          Shape
	embed, unembed blas32.General // [token][channel]
	layers         []layer
	finalGain      []float32
}

type layer struct {
	attentionGain, ffnGain []float32
	ranks                  [2]half
}

// half is a rank's part of a layer; matrices are [output][input].
type half struct {
	query, key, value, out blas32.General
	gate, up, down         blas32.General
}

// Reduce sums the partial results of the two ranks.
type Reduce func(parts [][]float32) ([]float32, error)

// NewTransformer draws the weights; the same arguments give the same ones.
func NewTransformer(s Shape, seed uint64) *Transformer {
	t := &Transformer{shape: s, layers: make([]layer, s.Layers)}
	var group sync.WaitGroup
	stream := uint64(0x100) // apart from the inputs' streams
	next := func() *rand.Rand {
		stream++
		return rand.New(rand.NewPCG(seed, stream))
	}
	matrix := func(to *blas32.General, outputs, inputs int, deviation float64) {
		random := next()
		*to = blas32.General{Rows: outputs, Cols: inputs, Stride: inputs, Data: make([]float32, outputs*inputs)}
		group.Go(func() {
			for i := range to.Data {
				to.Data[i] = float32(random.NormFloat64() * deviation)
			}
		})
	}
	gains := func(to *[]float32) {
		random := next()
		*to = make([]float32, s.Width)
		for i := range *to {
			(*to)[i] = float32(math.Exp(random.NormFloat64() * normSpread))
		}
	}
	width, ffn := float64(s.Width), float64(s.FFN)
	matrix(&t.embed, s.Vocab, s.Width, 1)
	matrix(&t.unembed, s.Vocab, s.Width, logitGain/math.Sqrt(width))
	gains(&t.finalGain)
	for i := range t.layers {
		l := &t.layers[i]
		gains(&l.attentionGain)
		gains(&l.ffnGain)
		for rank := range l.ranks {
			h := &l.ranks[rank]
			matrix(&h.query, s.Width/2, s.Width, attentionGain/math.Sqrt(width))
			matrix(&h.key, s.Width/2, s.Width, attentionGain/math.Sqrt(width))
			matrix(&h.value, s.Width/2, s.Width, 1/math.Sqrt(width))
			matrix(&h.out, s.Width, s.Width/2, blockGain/math.Sqrt(width))
			matrix(&h.gate, s.FFN/2, s.Width, 1/math.Sqrt(width))
			matrix(&h.up, s.FFN/2, s.Width, 1/math.Sqrt(width))
			matrix(&h.down, s.Width, s.FFN/2, blockGain/math.Sqrt(ffn))
		}
	}
	group.Wait()
	return t
}

// Tokens draws a text of n tokens.
func (t *Transformer) Tokens(seed uint64, n int) []int {
	random := rand.New(rand.NewPCG(seed, 0x100))
	tokens := make([]int, n)
	for i := range tokens {
		tokens[i] = random.IntN(t.shape.Vocab)
	}
	return tokens
}

// Logits gives the logits at every position, [position][token].
func (t *Transformer) Logits(tokens []int, reduce Reduce) ([]float32, error) {
	s := t.shape
	stream := newMatrix(len(tokens), s.Width)
	for i, token := range tokens {
		copy(row(stream, i), row(t.embed, token))
	}
	var parts [2][]float32
	addTotal := func() error {
		total, err := reduce(parts[:])
		if err != nil {
			return err
		}
		for i, x := range total {
			stream.Data[i] += x
		}
		return nil
	}
	for i := range t.layers {
		l := &t.layers[i]
		x := normed(stream, l.attentionGain)
		for rank := range l.ranks {
			parts[rank] = t.attention(&l.ranks[rank], x)
		}
		if err := addTotal(); err != nil {
			return nil, err
		}
		x = normed(stream, l.ffnGain)
		for rank := range l.ranks {
			parts[rank] = feedForward(&l.ranks[rank], x)
		}
		if err := addTotal(); err != nil {
			return nil, err
		}
	}
	return apply(t.unembed, normed(stream, t.finalGain)).Data, nil
}

// attention is a rank's part of the attention block.
func (t *Transformer) attention(h *half, x blas32.General) []float32 {
	s := t.shape
	query, key, value := apply(h.query, x), apply(h.key, x), apply(h.value, x)
	dim := s.Width / s.Heads
	mixed := newMatrix(x.Rows, s.Width/2)
	scale := float32(1 / math.Sqrt(float64(dim)))
	for from := 0; from < x.Rows; from += s.Sequence {
		n := min(s.Sequence, x.Rows-from)
		scores := newMatrix(n, (n+3)&^3)
		scores.Cols = n
		for head := range s.Heads / 2 {
			q, k, v := part(query, from, n, head*dim, dim), part(key, from, n, head*dim, dim), part(value, from, n, head*dim, dim)
			rotate(q)
			rotate(k)
			blas32.Gemm(blas.NoTrans, blas.Trans, scale, q, k, 0, scores)
			for i := range n {
				softmax(row(scores, i), i+1)
			}
			blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, scores, v, 0, part(mixed, from, n, head*dim, dim))
		}
	}
	return apply(h.out, mixed).Data
}

// feedForward is a rank's part of the feed-forward block.
func feedForward(h *half, x blas32.General) []float32 {
	gate, up := apply(h.gate, x), apply(h.up, x)
	for i, g := range gate.Data {
		silu := g / float32(1+math.Exp(-float64(g)))
		gate.Data[i] = silu * up.Data[i]
	}
	return apply(h.down, gate).Data
}

// apply gives x times the transposed weights: [position][output].
func apply(weights, x blas32.General) blas32.General {
	out := newMatrix(x.Rows, weights.Rows)
	blas32.Gemm(blas.NoTrans, blas.Trans, 1, x, weights, 0, out)
	return out
}

// normed is RMSNorm, channel by channel times a gain.
func normed(x blas32.General, gain []float32) blas32.General {
	out := newMatrix(x.Rows, x.Cols)
	for i := range x.Rows {
		squares := 0.0
		for _, v := range row(x, i) {
			squares += float64(v) * float64(v)
		}
		scale := float32(1 / math.Sqrt(squares/float64(x.Cols)+1e-6))
		to := row(out, i)
		for c, v := range row(x, i) {
			to[c] = v * scale * gain[c]
		}
	}
	return out
}

// rotate turns each pair of channels by an angle that grows with the position (rotary positions).
func rotate(x blas32.General) {
	for i := 0; i < x.Cols; i += 2 {
		speed := math.Pow(10000, -float64(i)/float64(x.Cols))
		for position := range x.Rows {
			sin64, cos64 := math.Sincos(float64(position) * speed)
			sin, cos := float32(sin64), float32(cos64)
			pair := row(x, position)[i : i+2]
			// The conversions keep the compiler from fusing, which would give other bits on other processors.
			pair[0], pair[1] = float32(pair[0]*cos)-float32(pair[1]*sin), float32(pair[0]*sin)+float32(pair[1]*cos)
		}
	}
}

// softmax over the first n scores; the rest, which lies in the future, becomes 0.
func softmax(scores []float32, n int) {
	most := scores[0]
	for _, s := range scores[:n] {
		most = max(most, s)
	}
	total := float32(0)
	for i, s := range scores[:n] {
		scores[i] = float32(math.Exp(float64(s - most)))
		total += scores[i]
	}
	for i := range scores[:n] {
		scores[i] /= total
	}
	clear(scores[n:])
}

func newMatrix(rows, cols int) blas32.General {
	return blas32.General{Rows: rows, Cols: cols, Stride: cols, Data: make([]float32, rows*cols)}
}

func row(m blas32.General, i int) []float32 { return m.Data[i*m.Stride:][:m.Cols] }

// part is a view.
func part(m blas32.General, fromRow, rows, fromCol, cols int) blas32.General {
	from := fromRow*m.Stride + fromCol
	return blas32.General{Rows: rows, Cols: cols, Stride: m.Stride, Data: m.Data[from : from+(rows-1)*m.Stride+cols]}
}
