package allreduce

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTypes(t *testing.T) {
	sizes := map[string]int{"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i8": 1, "u8": 1}
	for i := range Type(numTypes) {
		back, err := ParseType(i.String())
		require.NoError(t, err)
		assert.Equal(t, i, back)
		assert.Equal(t, sizes[i.String()], i.Size(), i)
	}
	for _, bad := range []string{"", "F32", "float32", "none", "f32 "} {
		_, err := ParseType(bad)
		require.ErrorIs(t, err, ErrArgument, bad)
		assert.ErrorContains(t, err, "bf16", "what is allowed is named")
	}
	assert.Equal(t, "none", TypeNone.String())
	assert.Zero(t, TypeNone.Size())
	assert.Equal(t, "type(99)", Type(99).String())
}

// The numbers are the C API's, and the spellings are those of the command's JSON.
func TestNumbersAndNames(t *testing.T) {
	assert.Equal(t, []Type{0, 1, 2, 3, 4, 5, 6, 7}, []Type{F32, F16, BF16, F64, I64, I32, I8, U8})
	assert.Equal(t, []Op{0, 1}, []Op{Sum, Avg})
	var paths []string
	for p := range Path(numPaths) {
		paths = append(paths, p.String())
	}
	assert.Equal(t, "none internal copy-engine peer nccl", strings.Join(paths, " "))
	assert.Equal(t, "path(-1) path(5)", Path(-1).String()+" "+Path(5).String())
	assert.Equal(t, "sum avg op(7)", Sum.String()+" "+Avg.String()+" "+Op(7).String())
	assert.Equal(t, "auto cuda emulated", BackendAuto.String()+" "+BackendCUDA.String()+" "+BackendEmulated.String())
	assert.Equal(t, "none: why", Route{Wire: TypeNone, Reason: "why"}.String())
	assert.Equal(t, "copy-engine (wire bf16): why", Route{Path: PathCopyEngine, Wire: BF16, Reason: "why"}.String())
}

func TestError(t *testing.T) {
	var err error = newError("New", ErrSetting, "%s is wrong", "X")
	assert.EqualError(t, err, "allreduce: New: X is wrong")
	require.ErrorIs(t, err, ErrSetting)
	var typed *Error
	require.True(t, errors.As(err, &typed))
	assert.Equal(t, -1, typed.Rank)

	assert.EqualError(t, &Error{Rank: -1, Device: 2, Peer: -1, Err: ErrRuntime, Code: 700},
		"allreduce: device 2: GPU runtime call failed (code 700)")
	assert.EqualError(t, &Error{Op: "Wait", Rank: 0, Device: 1, Err: ErrTimeout, Call: 7, Phase: "internal flags", Peer: 1, Seen: 3, Awaited: 4},
		"allreduce: Wait: rank 0 on device 1: deadline expired (call 7, internal flags, waiting for rank 1: saw 3, awaited 4)")
	assert.EqualError(t, &Error{Rank: 3, Device: -1}, "allreduce: rank 3: unknown error")
}
