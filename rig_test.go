package allreduce_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// childVariable says what a rank in a process of its own shall do (join_test.go).
const childVariable = "AR_TEST_JOIN"

func TestMain(m *testing.M) {
	if script := os.Getenv(childVariable); script != "" {
		os.Exit(joinChild(script))
	}
	testbackend.Main(m)
}

// tester is a *testing.T or a *rapid.T.
type tester interface {
	require.TestingT
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(f func())
}

// rig is a communicator with a stream per rank. Everything it makes it frees at the end of the test.
type rig struct {
	t       tester
	d       device.Driver
	comm    *allreduce.Comm
	devices []int
	streams []device.Stream
}

// newRig makes a communicator for cfg on a driver's devices; cfg.Devices says which, else Ranks.
func newRig(t tester, d device.Driver, cfg allreduce.Config) *rig {
	t.Helper()
	cfg.Backend = allreduce.Backend(d.Backend())
	comm, err := allreduce.New(cfg)
	require.NoError(t, err)
	r := &rig{t: t, d: d, comm: comm, devices: comm.Devices()}
	t.Cleanup(func() {
		if err := comm.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	for _, dev := range r.devices {
		s, err := d.NewStream(dev)
		require.NoError(t, err)
		r.streams = append(r.streams, s)
		t.Cleanup(func() { _ = d.DestroyStream(dev, s) })
	}
	return r
}

// malloc allocates on a rank's device until the end of the test.
func (r *rig) malloc(rank int, bytes int64) device.Ptr {
	r.t.Helper()
	p, err := r.d.Malloc(r.devices[rank], bytes)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { _ = r.d.Free(r.devices[rank], p) })
	return p
}

func (r *rig) wait() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	require.NoError(r.t, r.comm.Wait(ctx))
}

// job describes one checked reduction.
type job struct {
	typ          allreduce.Type
	op           allreduce.Op
	count        int
	kind         reference.Kind
	data         [][]byte // [rank] packed, instead of a kind
	seed         uint64
	inPlace      bool
	absent       []int
	sendOff      int64 // bytes added to Send and Recv, a multiple of the element
	recvOff      int64
	rows         int
	gapBytes     int64 // between rows, in Send; Recv gets twice as much
	defaultQueue bool  // the legacy default streams instead of the rig's
}

func (j job) String() string {
	return fmt.Sprintf("%s %s count %d rows %d gap %d %s in-place %v absent %v offsets %d %d", j.typ, j.op, j.count, j.rows, j.gapBytes, j.kind, j.inPlace, j.absent, j.sendOff, j.recvOff)
}

// prepared is a job with its buffers on the devices.
type prepared struct {
	job
	bufs  []allreduce.Buffer
	want  []byte // packed
	wire  allreduce.Type
	path  allreduce.Path
	guard [][]byte // what surrounds and fills Recv before
	recv  []device.Ptr
	bytes int64 // of a Recv allocation
}

const guardByte = 0xA5

func (j job) rowBytes() int64 {
	return int64(j.count/max(j.rows, 1)) * int64(j.typ.Size())
}

// spread writes packed rows into a larger area.
func (j job) spread(to, packed []byte, off, gap int64) {
	row := j.rowBytes()
	for i := range int64(max(j.rows, 1)) {
		copy(to[off+i*(row+gap):], packed[i*row:(i+1)*row])
	}
}

func (j job) gather(from []byte, off, gap int64) []byte {
	row := j.rowBytes()
	var out []byte
	for i := range int64(max(j.rows, 1)) {
		out = append(out, from[off+i*(row+gap):][:row]...)
	}
	return out
}

// setUp uploads a job's inputs and works out what must come out.
func (r *rig) setUp(j job) *prepared {
	r.t.Helper()
	ranks := len(r.devices)
	sendGap, recvGap := j.gapBytes, 2*j.gapBytes
	if j.inPlace {
		j.recvOff, recvGap = j.sendOff, sendGap
	}
	p := &prepared{job: j}
	extent := func(off, gap int64) int64 { return off + int64(max(j.rows, 1))*(j.rowBytes()+gap) + 64 }
	p.bytes = extent(j.recvOff, recvGap)
	inputs, absent := make([][]byte, ranks), make([]bool, ranks)
	for _, a := range j.absent {
		absent[a] = true
	}
	for rank := range ranks {
		inputs[rank] = make([]byte, j.count*j.typ.Size())
		if j.data != nil {
			copy(inputs[rank], j.data[rank])
		} else {
			reference.Fill(inputs[rank], j.kind, reference.Type(j.typ), j.seed, rank)
		}
		host := bytes.Repeat([]byte{guardByte}, int(p.bytes))
		recv := r.malloc(rank, p.bytes)
		send := recv
		if j.inPlace {
			if !absent[rank] {
				j.spread(host, inputs[rank], j.sendOff, sendGap)
			}
		} else {
			area := bytes.Repeat([]byte{guardByte}, int(extent(j.sendOff, sendGap)))
			j.spread(area, inputs[rank], j.sendOff, sendGap)
			send = r.malloc(rank, int64(len(area)))
			require.NoError(r.t, r.d.CopyToDevice(r.devices[rank], send, area))
		}
		require.NoError(r.t, r.d.CopyToDevice(r.devices[rank], recv, host))
		b := allreduce.Buffer{
			Send: send + device.Ptr(j.sendOff), Recv: recv + device.Ptr(j.recvOff), Count: j.count, Type: j.typ, Op: j.op,
			Stream: r.streams[rank], Absent: absent[rank], Rows: j.rows,
		}
		if j.gapBytes > 0 {
			b.SendPitch, b.RecvPitch = j.rowBytes()+sendGap, j.rowBytes()+recvGap
		}
		if j.defaultQueue {
			b.Stream = 0
		}
		if absent[rank] && !j.inPlace {
			b.Send = 0
		}
		p.bufs = append(p.bufs, b)
		p.recv = append(p.recv, recv)
		p.guard = append(p.guard, host)
	}
	route := r.comm.RouteFor(p.bufs[0])
	p.path, p.wire = route.Path, route.Wire
	if p.wire == allreduce.TypeNone {
		p.wire = j.typ
	}
	var err error
	p.want, err = reference.Reduction{
		Type: reference.Type(j.typ), Wire: reference.Type(p.wire), Op: reference.Op(j.op), Inputs: inputs, Absent: absent, Count: j.count,
	}.Result()
	require.NoError(r.t, err)
	return p
}

// check compares every rank's Recv, and what surrounds it, with what must be there.
func (r *rig) check(p *prepared) {
	r.t.Helper()
	gap := 2 * p.gapBytes
	off := p.recvOff
	if p.inPlace {
		gap, off = p.gapBytes, p.sendOff
	}
	for rank, recv := range p.recv {
		got := make([]byte, p.bytes)
		require.NoError(r.t, r.d.CopyToHost(r.devices[rank], got, recv))
		packed := p.gather(got, off, gap)
		if !bytes.Equal(p.want, packed) {
			size := p.typ.Size()
			for i := 0; i < len(p.want); i += size {
				if !bytes.Equal(p.want[i:i+size], packed[i:i+size]) {
					r.t.Fatalf("%s by %s wire %s: rank %d element %d is %x, want %x (little-endian)", p.job, p.path, p.wire, rank, i/size, packed[i:i+size], p.want[i:i+size])
				}
			}
		}
		p.spread(p.guard[rank], p.want, off, gap)
		require.True(r.t, bytes.Equal(p.guard[rank], got), "%s by %s: rank %d: bytes outside Recv were written", p.job, p.path, rank)
	}
}

// run sets a job up, reduces and checks.
func (r *rig) run(j job) *prepared {
	r.t.Helper()
	p := r.setUp(j)
	require.NoError(r.t, r.comm.AllReduce(p.bufs), j)
	r.sync()
	r.check(p)
	return p
}

// sync waits for every rank's streams.
func (r *rig) sync() {
	r.t.Helper()
	for _, dev := range r.devices {
		require.NoError(r.t, r.d.SynchronizeDevice(dev))
	}
	assert.NoError(r.t, r.comm.Err())
}
