//go:build cgo && linux && (amd64 || arm64)

package core

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestABIIsChecked(t *testing.T) {
	assert.Nil(t, Available())
	e := checkABI(2, 1)
	require.NotNil(t, e)
	assert.ErrorIs(t, e, ErrBackend)
	assert.Contains(t, e.Error(), "ABI version 2, its header 1")
}

func TestBackends(t *testing.T) {
	assert.True(t, HasBackend(BackendEmulated))
	for _, none := range []int32{-1, 0, 3, 31, 64} {
		assert.False(t, HasBackend(none))
	}
	assert.NotEmpty(t, Version())
}

// The hot call is one crossing into C and nothing on Go's heap, on failure too but for the error itself.
func TestHotCall(t *testing.T) {
	c, e := CreateComm(Options{Backend: BackendEmulated, Devices: []int32{0}})
	require.Nil(t, e)
	defer c.Free()
	call := func() *Error {
		var bufs [1]Buffer
		return c.AllReduce(&bufs[0], 1, PathNone, 0)
	}
	require.Nil(t, call())
	before := runtime.NumCgoCall()
	require.Nil(t, call())
	assert.Equal(t, int64(1), runtime.NumCgoCall()-before)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = call() }))

	var bufs [2]Buffer
	e = c.AllReduce(&bufs[0], 2, PathNone, 0)
	require.NotNil(t, e)
	assert.Equal(t, StatusArgument, e.Status)
	assert.Equal(t, -1, e.Rank)
}

func TestCreateCommRefuses(t *testing.T) {
	_, e := CreateComm(Options{Backend: BackendEmulated})
	require.ErrorIs(t, e, ErrArgument)
	_, e = CreateComm(Options{Backend: BackendEmulated, Devices: make([]int32, 9)})
	require.ErrorIs(t, e, ErrArgument)
	_, e = CreateComm(Options{Backend: 7, Devices: make([]int32, 1)})
	require.ErrorIs(t, e, ErrArgument)
}
