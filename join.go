//go:build linux

package allreduce

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu.example/allreduce/internal/core"
	"gpu.example/allreduce/internal/rendezvous"
)

// joinTimeout is how long ranks wait for each other where the context does not say.
const joinTimeout = time.Minute

// watchPeriod is how often a communicator over processes looks for ranks that disagree while kernels wait.
const watchPeriod = 50 * time.Millisecond

// Join makes a communicator over several processes, this one being one rank of it. All ranks call it with equal settings;
// it returns on all of them, or fails on all: where a rank is missing after a minute (or at ctx's deadline), with who it is;
// where settings, library versions or the number of ranks differ, with both values (ErrMismatch); where one rank cannot
// have its memory, with that rank's error. The zero Rank is what torchrun, mpirun or srun say.
//
// On one host the ranks meet through a Unix socket in $XDG_RUNTIME_DIR or a folder of this user's alone, named by the job:
// Config.Rendezvous (GGML_CUDA_AR_RENDEZVOUS), else Rank.Job. On several hosts Config.Rendezvous is host:port of rank 0 and
// Config.SecretFile names a file with the secret that all share; only NCCL connects hosts.
//
// The buffers of AllReduce are then this rank's, one. A rank whose process ends fails the communicator on all others with
// ErrPeerLost; ranks that make different reductions get ErrMismatch.
func Join(ctx context.Context, cfg Config, rank Rank) (*Comm, error) {
	c, err := join(ctx, cfg, rank)
	if err != nil {
		return nil, withOp("Join", err)
	}
	return c, nil
}

func join(ctx context.Context, cfg Config, rank Rank) (*Comm, error) {
	if e := core.Available(); e != nil {
		return nil, fromCore("", e)
	}
	if ctx == nil {
		ctx = context.Background()
	}
	rank, err := rank.resolve()
	if err != nil {
		return nil, err
	}
	s, warnings, err := loadSettings(cfg, os.Environ())
	if err != nil {
		return nil, err
	}
	backend, err := chooseBackend(s.backend)
	if err != nil {
		return nil, err
	}
	if backend == BackendEmulated && s.emulated != "" {
		if err := applyMachine(&s); err != nil {
			return nil, err
		}
	}
	count, e := core.DeviceCount(int32(backend))
	if e != nil {
		return nil, fromCore("", e)
	}
	device, err := rank.chooseDevice(&s, backend, count)
	if err != nil {
		return nil, err
	}
	if rank.World == 1 {
		cfg.Ranks, cfg.Devices = 0, []int{int(device)}
		return newComm(cfg)
	}
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	config, err := meetingPlace(&s, rank)
	if err != nil {
		return nil, err
	}
	for _, f := range s.compared(backend) {
		config.Fields = append(config.Fields, rendezvous.Field(f))
	}
	group, err := rendezvous.Open(ctx, config)
	if err != nil {
		return nil, joinError(err)
	}
	p := &party{group: group, rank: rank}
	c, err := p.form(ctx, &s, backend, device, warnings)
	if err != nil {
		if !p.agreed { // else every rank has this error, and an abort could overtake it
			group.Abort(fmt.Sprintf("rank %d: %s", rank.Rank, strings.TrimPrefix(err.Error(), "allreduce: ")))
		}
		group.Close()
		return nil, err
	}
	return c, nil
}

// meetingPlace says where the ranks meet.
func meetingPlace(s *settings, rank Rank) (rendezvous.Config, error) {
	c := rendezvous.Config{Rank: rank.Rank, World: rank.World, Timeout: joinTimeout}
	if !s.rendezvousTCP() {
		if rank.LocalWorld > 0 && rank.LocalWorld < rank.World {
			return c, newError("", ErrSetting, "%d of %d ranks are on this host: GGML_CUDA_AR_RENDEZVOUS has to name host:port of rank 0, and GGML_CUDA_AR_SECRET_FILE a shared secret",
				rank.LocalWorld, rank.World)
		}
		if c.Job = cmp.Or(s.rendezvous, rank.Job); c.Job == "" {
			return c, newError("", ErrSetting, "nothing tells this job from others: give GGML_CUDA_AR_RENDEZVOUS (or Config.Rendezvous) a job's name")
		}
		return c, nil
	}
	if c.Address = s.rendezvous; s.secretFile == "" {
		return c, newError("", ErrSetting, "GGML_CUDA_AR_RENDEZVOUS=%s is a TCP address: GGML_CUDA_AR_SECRET_FILE has to name a file with a shared secret", s.rendezvous)
	}
	secret, err := rendezvous.ReadSecret(s.secretFile)
	if err != nil {
		return c, newError("", ErrSetting, "GGML_CUDA_AR_SECRET_FILE: %s", err)
	}
	c.Secret = secret
	return c, nil
}

// joinError turns the rendezvous's errors into this package's.
func joinError(err error) error {
	var mismatch *rendezvous.MismatchError
	var missing *rendezvous.MissingError
	var lost *rendezvous.LostError
	switch {
	case errors.As(err, &mismatch):
		return newError("", ErrMismatch, "%s", mismatch)
	case errors.As(err, &missing):
		e := newError("", ErrTimeout, "%s", missing)
		if len(missing.Ranks) == 1 {
			e.Rank = missing.Ranks[0]
		}
		return e
	case errors.As(err, &lost):
		e := newError("", ErrPeerLost, "%s", lost)
		e.Rank = lost.Rank
		return e
	case errors.Is(err, context.Canceled):
		return newError("", context.Canceled, "%s", err)
	case errors.Is(err, context.DeadlineExceeded):
		return newError("", ErrTimeout, "%s", err)
	}
	return newError("", ErrRuntime, "%s", err)
}

// party is the connection to the other processes of a communicator.
type party struct {
	group  *rendezvous.Group
	rank   Rank
	agreed bool // that there will be no communicator
	stop   chan struct{}
	ended  chan struct{}
}

// leave says goodbye and ends what runs beside the communicator.
func (p *party) leave() {
	if p == nil || p.stop == nil {
		return
	}
	close(p.stop)
	<-p.ended
	p.group.Close()
}

// watch passes the end of another process on to the communicator, and looks now and then whether ranks disagree: a host
// that waits for a stream does not look by itself.
func (p *party) watch(c *core.Comm) {
	defer close(p.ended)
	ticker := time.NewTicker(watchPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-p.group.Done():
			var lost *rendezvous.LostError
			if errors.As(p.group.Err(), &lost) {
				c.Lose(lost.Rank, lost.Text)
			}
			<-p.stop
			return
		case <-ticker.C:
			if c.Err() != nil {
				ticker.Stop()
			}
		}
	}
}

// introduction is what a rank tells the others of itself.
type introduction struct {
	Host    string // boot id and UTS name: what shares memory
	Device  int32
	UUID    string
	BusID   string
	LinkGBs float64
}

// outcome is what a rank tells of a step that may have failed.
type outcome struct {
	Sentinel string
	Device   int
	Code     int
	Text     string
}

// sentinelsAcross are the errors that keep their type on the way to other ranks; anything else is ErrRuntime.
var sentinelsAcross = []error{ErrArgument, ErrSetting, ErrNoDevice, ErrAlloc, ErrRuntime, ErrTimeout, ErrMismatch, ErrUnsupported, ErrNCCL, ErrDeviceLost}

// agree makes one rank's failure everybody's: all get the error of the lowest rank that has one.
func (p *party) agree(ctx context.Context, mine error) error {
	var o outcome
	if mine != nil {
		o = outcome{Device: -1, Text: mine.Error(), Sentinel: ErrRuntime.Error()}
		var e *Error
		if errors.As(mine, &e) {
			o.Device, o.Code, o.Text = e.Device, e.Code, e.Message
		}
		for _, s := range sentinelsAcross {
			if errors.Is(mine, s) {
				o.Sentinel = s.Error()
			}
		}
	}
	all, err := gather(ctx, p.group, o)
	if err != nil {
		return err
	}
	for r, o := range all {
		if o.Sentinel == "" {
			continue
		}
		p.agreed = true
		if r == p.rank.Rank {
			return mine
		}
		e := newError("", ErrRuntime, "%s", o.Text)
		e.Rank, e.Device, e.Code = r, o.Device, o.Code
		for _, s := range sentinelsAcross {
			if s.Error() == o.Sentinel {
				e.Err = s
			}
		}
		return e
	}
	return nil
}

// gather exchanges one value of every rank.
func gather[T any](ctx context.Context, group *rendezvous.Group, mine T) ([]T, error) {
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	blobs, err := group.AllGather(ctx, text)
	if err != nil {
		return nil, joinError(err)
	}
	all := make([]T, len(blobs))
	for r, b := range blobs {
		if err := json.Unmarshal(b, &all[r]); err != nil {
			return nil, newError("", ErrRuntime, "rank %d sent what cannot be read: %s", r, err)
		}
	}
	return all, nil
}

// form makes the communicator, step by step with the other ranks.
func (p *party) form(ctx context.Context, s *settings, backend Backend, device int32, warnings []string) (*Comm, error) {
	all, err := p.introduce(ctx, backend, device)
	if err != nil {
		return nil, err
	}
	peers, err := p.findPeers(ctx, s, backend, all)
	if err != nil {
		return nil, err
	}
	world, me := p.rank.World, p.rank.Rank
	options := core.Options{
		Backend: int32(backend), Devices: make([]int32, world), LinkGBs: make([]float64, world),
		RingBytes: s.ringBytes, ChunkBytes: s.copyChunkBytes, Blocks: int32(s.blocks),
		SpinTimeoutMs: int32(max(s.spinTimeout/time.Millisecond, 1)), NoOp: s.noop,
		NCCLLib: ncclLibrary(s, backend), NCCLNoPeer: peers.forbidsNCCL(s), Peer: peers.allowed(s),
		Ranks: []int32{int32(me)}, SharedFD: -1,
	}
	oneHost := !s.rendezvousTCP()
	for r, i := range all {
		options.Devices[r], options.LinkGBs[r] = i.Device, i.LinkGBs
	}
	if oneHost {
		memory, err := p.share(ctx, core.SharedBytes(world, s.ringBytes))
		if err != nil {
			return nil, err
		}
		defer memory.Close()
		options.SharedFD = int(memory.Fd())
	}
	if options.NCCLID, err = p.ncclID(ctx, &options); err != nil {
		return nil, err
	}
	handle, e := core.CreateComm(options)
	var made error
	if e != nil {
		made = fromCore("", e)
	}
	if err := p.agree(ctx, made); err != nil {
		if handle != nil {
			handle.Free()
		}
		return nil, err
	}
	c, err := p.finish(ctx, handle, s, backend, options.Devices, peers)
	if err != nil {
		handle.Free()
		return nil, err
	}
	c.begin(s, append(warnings, peers.warnings...))
	return c, nil
}

// ncclID gives the id that rank 0 has made, nil where it could not: then there is no nccl path.
func (p *party) ncclID(ctx context.Context, o *core.Options) ([]byte, error) {
	var mine []byte
	if p.rank.Rank == 0 && o.NCCLLib != "" {
		mine, _ = core.NCCLID(o.Backend, o.NCCLLib, o.NCCLNoPeer)
	}
	id, _, err := p.group.Broadcast(ctx, mine)
	if err != nil {
		return nil, joinError(err)
	}
	if len(id) == 0 {
		return nil, nil
	}
	return id, nil
}

// introduce exchanges who is where; ranks of different processes do not share a device, since their kernels, which wait for
// each other, cannot be one launch.
func (p *party) introduce(ctx context.Context, backend Backend, device int32) ([]introduction, error) {
	mine := introduction{Host: hostIdentity(), Device: device}
	var failed error
	info, e := core.GetDeviceInfo(int32(backend), int(device))
	if e != nil {
		failed = fromCore("", e)
	}
	mine.UUID, mine.BusID = info.UUID, info.BusID
	links, _ := linkRates(backend, []int32{device})
	mine.LinkGBs = links[0]
	if err := p.agree(ctx, failed); err != nil {
		return nil, err
	}
	all, err := gather(ctx, p.group, mine)
	if err != nil {
		return nil, err
	}
	for r, a := range all {
		for q := range r {
			if b := all[q]; a.Host == b.Host && a.UUID == b.UUID {
				err := newError("", ErrArgument, "ranks %d and %d are on the same device, %s (%s): ranks of different processes need one each", q, r, a.UUID, a.BusID)
				err.Rank, err.Device = p.rank.Rank, int(device)
				p.agreed = true
				return nil, err
			}
		}
	}
	return all, nil
}

func hostIdentity() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var names unix.Utsname
	_ = unix.Uname(&names)
	return strings.TrimSpace(string(boot)) + " " + unix.ByteSliceToString(names.Nodename[:])
}

const sharedSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// share makes the memory of all ranks on rank 0 and hands it to the others. It is of no file system, so no limit of /dev/shm
// counts and nothing is left behind; it cannot shrink, so no access can fault; and it is reserved, so that too little
// memory is an error here.
func (p *party) share(ctx context.Context, bytes int64) (*os.File, error) {
	var memory *os.File
	var failed error
	if p.rank.Rank == 0 {
		memory, failed = makeShared(bytes)
	}
	if err := p.agree(ctx, failed); err != nil {
		return nil, err
	}
	if p.rank.Rank == 0 {
		_, _, err := p.group.Broadcast(ctx, nil, memory)
		if err != nil {
			_ = memory.Close()
			return nil, joinError(err)
		}
	} else {
		_, files, err := p.group.Broadcast(ctx, nil)
		if err != nil {
			return nil, joinError(err)
		}
		for i, f := range files {
			if i == 0 {
				memory = f
			} else {
				_ = f.Close()
			}
		}
		failed = checkShared(memory, bytes)
	}
	if err := p.agree(ctx, failed); err != nil {
		if memory != nil {
			_ = memory.Close()
		}
		return nil, err
	}
	return memory, nil
}

func makeShared(bytes int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("allreduce", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, newError("", ErrAlloc, "making shared memory: %s", err)
	}
	memory := os.NewFile(uintptr(fd), "allreduce shared memory")
	if err := unix.Fallocate(fd, 0, 0, bytes); err != nil {
		_ = memory.Close()
		return nil, newError("", ErrAlloc, "reserving %d bytes of shared memory: %s", bytes, err)
	}
	if _, err := unix.FcntlInt(memory.Fd(), unix.F_ADD_SEALS, sharedSeals); err != nil {
		_ = memory.Close()
		return nil, newError("", ErrRuntime, "sealing shared memory: %s", err)
	}
	return memory, nil
}

func checkShared(memory *os.File, bytes int64) error {
	if memory == nil {
		return newError("", ErrRuntime, "rank 0's shared memory did not arrive")
	}
	seals, err := unix.FcntlInt(memory.Fd(), unix.F_GET_SEALS, 0)
	info, statErr := memory.Stat()
	if err != nil || statErr != nil || seals&sharedSeals != sharedSeals || info.Size() != bytes {
		return newError("", ErrRuntime, "what rank 0 sent is no sealed memory of %d bytes", bytes)
	}
	return nil
}

// capabilityAcross is a capability as ranks tell it.
type capabilityAcross struct {
	OK      bool
	Why     string
	Version int // of NCCL
}

// finish finds the paths that exist on every rank and allocates what they need.
func (p *party) finish(ctx context.Context, handle *core.Comm, s *settings, backend Backend, devices []int32, peers *peerAccess) (*Comm, error) {
	me := p.rank.Rank
	if err := p.openPeers(ctx, handle, s, peers); err != nil {
		return nil, err
	}
	caps := capabilitiesOf(handle, peers)
	var mine [numPaths]capabilityAcross
	for path := range Path(numPaths) {
		c := caps.of(path)
		mine[path] = capabilityAcross{OK: c.ok, Why: c.why}
	}
	mine[PathNCCL].Version = handle.Stats().NCCLVersion
	all, err := gather(ctx, p.group, mine)
	if err != nil {
		return nil, err
	}
	for path := PathInternal; path < numPaths; path++ {
		c := caps.of(path)
		for r, theirs := range all {
			if !theirs[path].OK && c.ok {
				c.ok, c.why = false, fmt.Sprintf("rank %d: %s", r, theirs[path].Why)
			}
			if c.ok && theirs[path].Version != all[0][path].Version {
				c.ok, c.why = false, fmt.Sprintf("NCCL is %d on rank 0 and %d on rank %d", all[0][path].Version, theirs[path].Version, r)
			}
		}
	}
	table, err := newRouteTable(s, &caps, p.rank.World)
	if err := p.agree(ctx, err); err != nil {
		return nil, err
	}
	c := &Comm{core: handle, backend: backend, devices: devices[me : me+1], ranks: []int{me}, world: p.rank.World, table: table, party: p}
	c.log, c.traceLog = loggers(s)
	for _, path := range []Path{PathCopyEngine, PathNCCL} {
		if !table.uses(path) {
			continue
		}
		var failed error
		if e := handle.Prepare(preparedAcross, int32(path)); e != nil {
			failed = fromCore("", e)
		}
		switch err := p.agree(ctx, failed); {
		case errors.Is(err, ErrAlloc) || errors.Is(err, ErrNCCL) && s.algorithm != AlgorithmNCCL:
			// All ranks give the path up together, or they would wait for each other on different ones.
			c.failed[path].Store(everyKey)
			c.warn(fmt.Sprintf("%s is given up on all ranks (%s)", path, strings.TrimPrefix(err.Error(), "allreduce: ")))
		case err != nil:
			return nil, err
		}
	}
	if err := p.group.Barrier(ctx); err != nil {
		return nil, joinError(err)
	}
	p.stop, p.ended = make(chan struct{}), make(chan struct{})
	go p.watch(handle)
	return c, nil
}

// preparedAcross is the payload that paths are prepared for: across processes nothing is allocated later.
const preparedAcross = 1 << 40
