package core

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestStatuses(t *testing.T) {
	for status := StatusArgument; status < StatusPending; status++ {
		assert.NotNil(t, sentinels[status], "status %d has a sentinel", status)
		assert.ErrorIs(t, newError(status, "x"), sentinels[status])
	}
	unknown := newError(99, "")
	assert.ErrorIs(t, unknown, ErrRuntime)
	assert.Equal(t, ErrRuntime.Error(), unknown.Error())
}

func TestSentinelsAreDistinct(t *testing.T) {
	for a, x := range sentinels {
		for b, y := range sentinels {
			assert.Equal(t, a == b, errors.Is(x, y))
		}
	}
}
