package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

// perfRig is what all measurements of a process share: devices, a stream per rank, buffers, and the communicators.
type perfRig struct {
	*session // of the first variant
	job      *perfJob
	ours     []*side
	nccl     map[allreduce.Type]*side // by the wire that travels
	library  string                   // NCCL's, "": the environment's
	arena    arena
	events   [][]device.Event // [rank][i], recorded outside captures only
	forks    []device.Event   // one per rank; inside captures and outside alternately would not do
	captured []device.Event   // the same for captures
	beat     []device.Ptr     // across processes: a reduction that nobody looks at, after which the ranks are level
}

// side is one of the things compared: a communicator on the rig's streams.
type side struct {
	session
	name    string // "" for ours without a choice, else such as "prefer=latency"; NCCL's version
	variant variant
	nccl    bool
}

var (
	algorithmOf = map[string]allreduce.Algorithm{"auto": allreduce.AlgorithmAuto, "internal": allreduce.AlgorithmInternal,
		"ce": allreduce.AlgorithmCopyEngine, "copy-engine": allreduce.AlgorithmCopyEngine, "peer": allreduce.AlgorithmPeer,
		"nccl": allreduce.AlgorithmNCCL}
	preferOf = map[string]allreduce.Prefer{"overlap": allreduce.PreferOverlap, "latency": allreduce.PreferLatency}
	wireOf   = map[string]allreduce.WireChoice{"auto": allreduce.WireAuto, "f32": allreduce.WireF32, "bf16": allreduce.WireBF16,
		"f16": allreduce.WireF16}
	wireFor = map[allreduce.Type]allreduce.WireChoice{allreduce.F32: allreduce.WireF32, allreduce.BF16: allreduce.WireBF16,
		allreduce.F16: allreduce.WireF16}
)

// String names what was asked for: "wire=bf16 prefer=latency".
func (v variant) String() string {
	var words []string
	for _, w := range []struct{ name, value string }{{"wire", v.Wire}, {"path", v.Path}, {"prefer", v.Prefer}} {
		if w.value != "" {
			words = append(words, w.name+"="+w.value)
		}
	}
	return strings.Join(words, " ")
}

func (r *perfRig) config(v variant) allreduce.Config {
	return allreduce.Config{Ranks: r.job.Ranks, Devices: r.job.Devices, Algorithm: algorithmOf[v.Path], Prefer: preferOf[v.Prefer],
		Wire: wireOf[v.Wire], NCCLLib: r.library, CacheDir: r.job.Cache}
}

// openRig makes our communicators, streams and buffers. The caller closes the rig.
func openRig(ctx context.Context, driver device.Driver, job *perfJob, library string) (r *perfRig, err error) {
	r = &perfRig{job: job, library: library, nccl: map[allreduce.Type]*side{}}
	if r.session, err = openSession(driver, createFor(ctx, job.rank), r.config(job.Variants[0])); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	for i, v := range job.Variants {
		comm := r.comm
		if i > 0 {
			if comm, err = r.newComm(r.config(v)); err != nil {
				return nil, err
			}
		}
		r.ours = append(r.ours, r.sideOf(comm, v, v.String()))
	}
	for _, dev := range r.devices {
		for _, list := range []*[]device.Event{&r.forks, &r.captured} {
			event, err := r.newEvents(dev, 1)
			if err != nil {
				return nil, err
			}
			*list = append(*list, event...)
		}
		events, err := r.newEvents(dev, maxSamplesPerBatch+1)
		if err != nil {
			return nil, err
		}
		r.events = append(r.events, events)
	}
	if r.arena, err = r.newArena(); err != nil {
		return nil, err
	}
	if job.rank != nil {
		p, err := r.malloc(r.devices[0], alignment)
		if err != nil {
			return nil, err
		}
		r.beat = []device.Ptr{p}
	}
	return r, r.loadKernels()
}

func (r *perfRig) sideOf(comm *allreduce.Comm, v variant, name string) *side {
	s := &side{session: *r.session, variant: v, name: name}
	s.comm, s.cleanup = comm, nil
	return s
}

// ncclSide gives NCCL with the wire that travels on our side; made once for each wire.
func (r *perfRig) ncclSide(wire allreduce.Type) (*side, error) {
	if s := r.nccl[wire]; s != nil {
		return s, nil
	}
	config := r.config(variant{Path: "nccl"})
	if r.job.Type == allreduce.F32 {
		config.Wire = wireFor[wire]
	}
	comm, err := r.newComm(config)
	if err != nil {
		return nil, err
	}
	s := r.sideOf(comm, variant{Wire: wire.String(), Path: "nccl"}, ncclVersion(comm.Stats().NCCLVersion))
	s.nccl = true
	r.nccl[wire] = s
	return s, nil
}

// sides lists all communicators made so far.
func (r *perfRig) sides() []*side {
	list := slices.Clone(r.ours)
	for _, wire := range []allreduce.Type{allreduce.F32, allreduce.BF16, allreduce.F16} {
		if s := r.nccl[wire]; s != nil {
			list = append(list, s)
		}
	}
	return list
}

// ncclVersion writes NCCL's version code as people do; "" for none.
func ncclVersion(code int) string {
	if code == 0 {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", code/10000, code/100%100, code%100)
}

// compareVersions orders "2.28.3" before "2.30.7".
func compareVersions(a, b string) int {
	numbers := func(text string) (list [3]int) {
		for i, part := range strings.SplitN(text, ".", 3) {
			list[i], _ = strconv.Atoi(part)
		}
		return list
	}
	x, y := numbers(a), numbers(b)
	return cmp.Or(cmp.Compare(x[0], y[0]), cmp.Compare(x[1], y[1]), cmp.Compare(x[2], y[2]))
}

// arena is the memory of all measurements, allocated and filled once: every reduction takes a window of it. A window of
// want holds the sum of the same windows of all ranks' send, whatever its size, since reductions go element by element.
type arena struct {
	bytes                   int64
	send, recv, want, wrong []device.Ptr // of each rank
}

const (
	// The windows of one size, minSets to maxSets of them, share this much of each part of the arena.
	arenaBytes          = 512 << 20
	arenaBytesSimulated = 24 << 20

	// The arena repeats itself after so many bytes: no multiple of a usual payload, so that windows differ.
	arenaPeriod = 48<<20 + 7*alignment
)

func windowBytes(payload int64) int64 {
	return (max(payload, 1) + alignment - 1) / alignment * alignment
}

// windows is how many windows of a payload the arena has, at most maxSets.
func (r *perfRig) windows(payload int64) int {
	share := int64(arenaBytes)
	if r.simulated() {
		share = arenaBytesSimulated
	}
	return int(min(max(share/windowBytes(payload), minSets), maxSets))
}

func (r *perfRig) newArena() (a arena, err error) {
	for _, payload := range append(slices.Clone(r.job.Sizes), r.job.Overlap...) {
		a.bytes = max(a.bytes, int64(r.windows(payload))*windowBytes(payload))
	}
	parts := []*[]device.Ptr{&a.send, &a.recv, &a.want, &a.wrong}
	if r.job.Windows {
		s, err := r.ncclSide(r.job.Type)
		if err != nil {
			return a, err
		}
		for _, part := range parts[:2] {
			if *part, err = s.comm.NCCLWindows(a.bytes); err != nil {
				return a, err
			}
		}
		parts = parts[2:]
	}
	for _, dev := range r.devices {
		for _, part := range parts {
			bytes := a.bytes
			if part == &a.wrong {
				bytes = device.CountersBytes
			}
			p, err := r.driver.Malloc(dev, bytes)
			if err != nil {
				return a, err
			}
			r.later(func() { _ = r.driver.Free(dev, p) })
			*part = append(*part, p)
		}
	}
	return a, r.fillArena(&a)
}

// fillArena makes inputs whose sums are exact in any order and on any wire, so that NCCL too can be compared bit for bit.
func (r *perfRig) fillArena(a *arena) error {
	const piece = 8 << 20
	period := min(a.bytes, arenaPeriod)
	for from := int64(0); from < period; from += piece {
		reduction := reference.Reduction{Type: reference.Type(r.job.Type), Wire: reference.Type(r.job.Type), Op: reference.Op(r.job.Op)}
		for rank := range r.job.Ranks {
			input := make([]byte, min(piece, period-from))
			reference.Fill(input, reference.Integers, reduction.Type, r.job.Seed*1_000_003+uint64(from), rank)
			reduction.Inputs = append(reduction.Inputs, input)
		}
		want, err := reduction.Result()
		if err != nil {
			return err
		}
		at := device.Ptr(from)
		for rank, dev := range r.devices {
			if err := r.driver.CopyToDevice(dev, a.send[rank]+at, reduction.Inputs[r.ranks[rank]]); err != nil {
				return err
			}
			if err := r.driver.CopyToDevice(dev, a.want[rank]+at, want); err != nil {
				return err
			}
		}
	}
	for rank, dev := range r.devices {
		// A copy from pageable memory may return before its last bytes are there.
		if err := r.driver.SynchronizeDevice(dev); err != nil {
			return err
		}
		for to := period; to < a.bytes; to += period {
			bytes := min(period, a.bytes-to)
			for _, p := range []device.Ptr{a.send[rank], a.want[rank]} {
				if err := r.driver.CopyAsync(dev, p+device.Ptr(to), p, bytes, r.streams[rank]); err != nil {
					return err
				}
			}
		}
		if err := r.driver.FillAsync(dev, a.wrong[rank], 0, device.CountersBytes, r.streams[rank]); err != nil {
			return err
		}
	}
	return r.synchronize()
}

// loadKernels launches our own kernels once: a first launch while a reduction's kernel waits for its peer could wait for it.
func (r *perfRig) loadKernels() error {
	for rank, dev := range r.devices {
		if err := r.driver.Load(dev, 1, 1, r.streams[rank]); err != nil {
			return err
		}
		rows := device.Rows{Got: r.arena.want[rank], Want: r.arena.want[rank], Rows: 1, Count: 1, Type: int32(r.job.Type)}
		if err := r.driver.Compare(dev, rows, r.arena.wrong[rank], r.streams[rank]); err != nil {
			return err
		}
	}
	return r.synchronize()
}

// tolerance is by how much a result may differ from the arena's: not at all, but for an average over a number of ranks that
// is no power of two. NCCL divides before it adds, and a narrower wire rounds the quotient.
func (r *perfRig) tolerance(route allreduce.Route) float32 {
	ours := route.Path != allreduce.PathNCCL && (route.Wire == r.job.Type || route.Wire == allreduce.TypeNone)
	if ours || r.job.Op != allreduce.Avg || r.job.Ranks&(r.job.Ranks-1) == 0 {
		return 0
	}
	// Values reach 15; each of the terms and sums is rounded once, by at most half an ulp of 16.
	ulp := map[allreduce.Type]float32{allreduce.F32: 0x1p-20, allreduce.F16: 0x1p-7, allreduce.BF16: 0x1p-4}[route.Wire]
	return ulp * float32(r.job.Ranks)
}
