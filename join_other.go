//go:build !linux

package allreduce

import (
	"context"

	"gpu.example/allreduce/internal/core"
)

// Join fails with ErrPlatform elsewhere than on Linux.
func Join(context.Context, Config, Rank) (*Comm, error) {
	return nil, fromCore("Join", core.Available())
}

// party is the other processes; there are none.
type party struct{}

func (*party) leave() {}
