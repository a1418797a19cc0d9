package device_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
)

func TestOpen(t *testing.T) {
	_, err := device.Open(7)
	require.ErrorIs(t, err, device.ErrArgument)
	var zero device.Driver
	_, err = zero.Malloc(0, 16)
	require.ErrorIs(t, err, device.ErrArgument)
	_, err = device.Open(device.CUDA)
	if err != nil {
		assert.True(t, errors.Is(err, device.ErrBackend) || errors.Is(err, device.ErrNoDevice), "%v", err)
	}
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		n, err := d.Count()
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, 2)
		for dev := range n {
			info, err := d.Info(dev)
			require.NoError(t, err)
			assert.NotEmpty(t, info.Name)
			assert.NotEmpty(t, info.UUID)
			assert.NotEmpty(t, info.BusID)
			assert.Positive(t, info.SMs)
			assert.Positive(t, info.MemoryBytes)
			assert.Equal(t, d.Backend() == device.Emulated, info.Simulated)
		}
		_, err = d.Info(n)
		var e *device.Error
		require.ErrorAs(t, err, &e)
		assert.ErrorIs(t, err, device.ErrNoDevice)
		assert.Equal(t, "Info", e.Op)
		assert.Equal(t, n, e.Device)
		assert.Contains(t, err.Error(), "device: Info: ")
		_, err = d.CanAccessPeer(0, 1)
		require.NoError(t, err)
	})
}

func TestMemoryStreamsEvents(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		const n = 4096
		a, err := d.Malloc(0, n)
		require.NoError(t, err)
		b, err := d.Malloc(0, n)
		require.NoError(t, err)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		start, err := d.NewEvent(0)
		require.NoError(t, err)
		stop, err := d.NewEvent(0)
		require.NoError(t, err)

		in := make([]float32, n/4)
		for i := range in {
			in[i] = float32(i)
		}
		require.NoError(t, d.CopyToDevice(0, a, device.Bytes(in)))
		require.NoError(t, d.Record(0, start, s))
		require.NoError(t, d.CopyAsync(0, b, a, n, s))
		require.NoError(t, d.FillAsync(0, b+n-4, 0xFF, 4, s))
		require.NoError(t, d.Record(0, stop, s))
		require.NoError(t, d.SynchronizeEvent(0, stop))
		require.NoError(t, d.Synchronize(0, s))
		done, err := d.Query(0, s)
		require.NoError(t, err)
		assert.True(t, done)
		us, err := d.ElapsedMicros(0, start, stop)
		require.NoError(t, err)
		assert.Positive(t, us)
		span, err := d.Elapsed(0, start, stop)
		require.NoError(t, err)
		assert.InDelta(t, us, float64(span.Nanoseconds())/1000, 0.01)

		out := make([]uint32, n/4)
		require.NoError(t, d.CopyToHost(0, device.Bytes(out), b))
		assert.Equal(t, uint32(0xFFFFFFFF), out[n/4-1])
		assert.Equal(t, uint32(0x3F800000), out[1])

		// Another stream, ordered by an event.
		other, err := d.NewStream(0)
		require.NoError(t, err)
		require.NoError(t, d.FillAsync(0, a, 1, n, s))
		require.NoError(t, d.Record(0, stop, s))
		require.NoError(t, d.WaitEvent(0, other, stop))
		require.NoError(t, d.CopyAsync(0, b, a, n, other))
		require.NoError(t, d.SynchronizeDevice(0))
		require.NoError(t, d.CopyToHost(0, device.Bytes(out), b))
		assert.Equal(t, uint32(0x01010101), out[n/4-1])

		require.NoError(t, d.CopyToDevice(0, a, nil))
		require.NoError(t, d.DestroyEvent(0, start))
		require.NoError(t, d.DestroyEvent(0, stop))
		require.NoError(t, d.DestroyStream(0, s))
		require.NoError(t, d.DestroyStream(0, other))
		require.NoError(t, d.Free(0, a))
		require.NoError(t, d.Free(0, b))

		p, err := d.MallocHost(64)
		require.NoError(t, err)
		assert.NotZero(t, p)
		require.NoError(t, d.FreeHost(p))
		_, err = d.Malloc(0, 1<<50)
		require.ErrorIs(t, err, device.ErrAlloc)
		_, err = d.Malloc(0, -1)
		require.ErrorIs(t, err, device.ErrArgument)
	})
}

func TestGraph(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		a, err := d.Malloc(0, 64)
		require.NoError(t, err)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		require.NoError(t, d.FillAsync(0, a, 0, 64, s))
		require.NoError(t, d.BeginCapture(0, s))
		require.NoError(t, d.FillAsync(0, a, 7, 32, s))
		require.NoError(t, d.CopyAsync(0, a+32, a, 32, s))
		g, err := d.EndCapture(0, s)
		require.NoError(t, err)
		out := make([]byte, 64)
		require.NoError(t, d.Synchronize(0, s))
		require.NoError(t, d.CopyToHost(0, out, a))
		assert.Equal(t, byte(0), out[63], "a capture runs nothing")
		for range 3 {
			require.NoError(t, d.FillAsync(0, a, 0, 64, s))
			require.NoError(t, d.Launch(0, g, s))
			require.NoError(t, d.Synchronize(0, s))
			require.NoError(t, d.CopyToHost(0, out, a))
			assert.Equal(t, byte(7), out[63])
		}
		require.NoError(t, d.DestroyGraph(0, g))
		require.NoError(t, d.DestroyStream(0, s))
		require.NoError(t, d.Free(0, a))
	})
}

// Of a bad pointer only emulated devices know: CUDA would be asked at the cost of a reduction.
func TestBadPointers(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		a, err := d.Malloc(0, 64)
		require.NoError(t, err)
		buf := make([]byte, 64)
		for name, err := range map[string]error{
			"beyond the end":   d.CopyToDevice(0, a+1, buf),
			"nobody's":         d.CopyToHost(0, buf, 4096),
			"free inside":      d.Free(0, a+4),
			"another's stream": d.FillAsync(0, a, 0, 64, 12345),
			"no event":         d.Record(0, 99, 0),
			"no graph":         d.Launch(0, 99, 0),
		} {
			assert.ErrorIs(t, err, device.ErrArgument, name)
		}
		require.NoError(t, d.Free(0, a))
		assert.ErrorIs(t, d.Free(0, a), device.ErrArgument, "freed twice")
	})
}

func TestBytes(t *testing.T) {
	assert.Nil(t, device.Bytes[float32](nil))
	assert.Len(t, device.Bytes(make([]uint16, 3)), 6)
	f := []float32{1}
	device.Bytes(f)[3] = 0xBF
	assert.Equal(t, float32(-1), f[0])
}

func TestNames(t *testing.T) {
	assert.Equal(t, "cuda", device.CUDA.String())
	assert.Equal(t, "emulated", device.Emulated.String())
	assert.Equal(t, "backend(9)", device.Backend(9).String())
	assert.Equal(t, "stepped", device.Stepped.String())
	assert.Equal(t, "unknown(9)", device.Schedule(9).String())
	assert.Equal(t, "device-to-host", device.TraceDeviceToHost.String())
}
