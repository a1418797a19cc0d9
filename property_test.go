package allreduce_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// Any communicator, any row of calls, any machine and schedule, eager or replayed: every rank holds the reference's bits, and
// nothing around them was touched. What fails is made as small as it can be; go test -run TestAnyReduction -rapid.checks=5000
// looks longer, and -rapid.failfile repeats a failure.
func TestAnyReduction(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(8), func(t *testing.T, d device.Driver) {
		rapid.Check(t, func(t *rapid.T) { anyReduction(t, d) })
	})
}

func anyReduction(t *rapid.T, d device.Driver) {
	access := rapid.Bool().Draw(t, "peer access")
	cfg := anyCommunicator(t, access)
	require.NoError(t, device.Configure(anyMachine(t, len(cfg.Devices), access), true))
	r := newRig(t, d, cfg)
	var jobs []*prepared
	var before [][][]byte // what each Recv held
	for range rapid.IntRange(1, 3).Draw(t, "calls") {
		p := r.setUp(anyJob(t, len(cfg.Devices)))
		var held [][]byte
		for _, area := range p.guard {
			held = append(held, bytes.Clone(area))
		}
		jobs, before = append(jobs, p), append(before, held)
	}
	calls := func() {
		for _, p := range jobs {
			require.NoError(t, r.comm.AllReduce(p.bufs), "%s by %s wire %s", p.job, p.path, p.wire)
		}
	}
	again := calls
	if rapid.Bool().Draw(t, "graph") {
		graph := r.capture(calls)
		again = func() { r.launch(graph) }
	}
	for range rapid.IntRange(1, 2).Draw(t, "times") {
		for i, p := range jobs {
			for rank, area := range before[i] {
				require.NoError(t, d.CopyToDevice(r.devices[rank], p.recv[rank], area))
				copy(p.guard[rank], area)
			}
		}
		again()
		r.sync()
		for _, p := range jobs {
			r.check(p)
		}
	}
}

// anyCommunicator draws settings. Devices has one entry per rank.
func anyCommunicator(t *rapid.T, access bool) allreduce.Config {
	ranks := rapid.IntRange(1, 8).Draw(t, "ranks")
	devices := rapid.OneOf(rapid.Just(ranks), rapid.IntRange(1, ranks)).Draw(t, "devices")
	algorithms := []allreduce.Algorithm{allreduce.AlgorithmAuto, allreduce.AlgorithmInternal, allreduce.AlgorithmCopyEngine}
	if access && devices > 1 {
		algorithms = append(algorithms, allreduce.AlgorithmPeer, allreduce.AlgorithmPeer)
	}
	cfg := allreduce.Config{
		Algorithm: rapid.SampledFrom(algorithms).Draw(t, "algorithm"),
		P2P:       allreduce.P2PTrust,
		Wire: rapid.SampledFrom([]allreduce.WireChoice{allreduce.WireF32, allreduce.WireAuto, allreduce.WireBF16,
			allreduce.WireF16}).Draw(t, "wire"),
		CEMinBytes:     rapid.SampledFrom([]int64{1, 10000, 512 << 10}).Draw(t, "CE from"),
		CopyChunkBytes: rapid.SampledFrom([]int64{allreduce.ChunkByLink, 64 << 10}).Draw(t, "chunk"),
		Blocks:         rapid.SampledFrom([]int{allreduce.BlocksMeasured, 1, 3}).Draw(t, "blocks"),
		RingBytes:      1 << 20, // so that these sizes go round it
	}
	for rank := range ranks {
		cfg.Devices = append(cfg.Devices, rank%devices)
	}
	return cfg
}

// anyMachine draws a machine and the schedule it runs by. The slower a link, the smaller what two-shot serves, and the less of
// it the link's rank owns.
func anyMachine(t *rapid.T, devices int, access bool) device.Machine {
	m := device.DefaultMachine(devices)
	if access {
		m = peersMachine(devices)
	}
	m.Drive = rapid.SampledFrom([]device.Drive{device.Stepped, device.Stepped, device.Stepped, device.Background}).Draw(t, "drive")
	m.Schedule = rapid.SampledFrom([]device.Schedule{device.FIFO, device.Random, device.Adversarial, device.Priorities}).Draw(t, "schedule")
	m.Seed = rapid.Uint64Range(1, 1<<20).Draw(t, "seed")
	slowest := rapid.SampledFrom([]float64{48, 3, 0.05}).Draw(t, "GB/s")
	for i := range m.Devices {
		gbs := slowest * rapid.SampledFrom([]float64{1, 1, 2, 20}).Draw(t, "link")
		m.Devices[i].H2DGBs, m.Devices[i].D2HGBs, m.Devices[i].DuplexGBs = gbs, gbs, gbs
		m.Devices[i].ResidentBlocks = 2048 // eight ranks of path peer
	}
	return m
}

func anyJob(t *rapid.T, ranks int) job {
	j := job{
		typ:     rapid.SampledFrom([]allreduce.Type{allreduce.F32, allreduce.F16, allreduce.BF16}).Draw(t, "type"),
		op:      rapid.SampledFrom([]allreduce.Op{allreduce.Sum, allreduce.Avg}).Draw(t, "op"),
		count:   rapid.OneOf(rapid.IntRange(0, 70), rapid.IntRange(1, 5000), rapid.IntRange(1, 150000)).Draw(t, "count"),
		kind:    rapid.SampledFrom([]reference.Kind{reference.Integers, reference.Normal, reference.Specials}).Draw(t, "values"),
		seed:    rapid.Uint64Range(0, 1000).Draw(t, "data"),
		inPlace: rapid.Bool().Draw(t, "in place"),
	}
	element := int64(j.typ.Size())
	j.sendOff = element * rapid.Int64Range(0, 8).Draw(t, "send offset")
	j.recvOff = element * rapid.Int64Range(0, 8).Draw(t, "recv offset")
	if rows := rapid.OneOf(rapid.Just(0), rapid.IntRange(1, 9)).Draw(t, "rows"); rows > 0 && j.count >= rows {
		j.rows = rows
		j.count -= j.count % rows
		j.gapBytes = element * rapid.Int64Range(0, 9).Draw(t, "gap")
	}
	absent := rapid.OneOf(rapid.Just(0), rapid.IntRange(0, 1<<ranks-1)).Draw(t, "absent")
	for rank := range ranks {
		if absent>>rank&1 != 0 {
			j.absent = append(j.absent, rank)
		}
	}
	return j
}
