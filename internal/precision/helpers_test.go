package precision

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/gonum/blas/blas32"
)

// matrix64 reads weights as float64.
type matrix64 blas32.General

func (m matrix64) at(o, i int) float64 { return float64(m.Data[o*m.Stride+i]) }

func requireClose(t *testing.T, want [][]float64, got []float32) {
	t.Helper()
	for p, values := range want {
		for i, v := range values {
			require.InDelta(t, v, float64(got[p*len(values)+i]), 1e-4, "position %d, channel %d", p, i)
		}
	}
}
