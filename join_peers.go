//go:build linux

package allreduce

import (
	"context"
	"fmt"

	"gpu.example/allreduce/internal/core"
	"gpu.example/allreduce/internal/verdicts"
)

// Peer access across processes: what is known about it, and the ranks' rings, which each process opens by handles.

// findPeers says what is known about peer access between the ranks' devices. The driver is asked by every rank about the
// devices it sees, which may be its own alone; verdicts are read, and found where there are none, by rank 0.
func (p *party) findPeers(ctx context.Context, s *settings, backend Backend, all []introduction) (*peerAccess, error) {
	mine := accessAcross{Verdict: verdictUnproven}
	var failed error
	if s.rendezvousTCP() {
		mine.Verdict = verdictDenied
	} else if mine.Verdict, failed = grantedHere(backend, all); failed == nil && p.rank.Rank == 0 && mine.Verdict == verdictUnproven {
		found := searchVerdicts(ctx, s, backend, all)
		mine = accessAcross{Verdict: found.verdict, Why: found.why, Warnings: found.warnings}
	}
	if err := p.agree(ctx, failed); err != nil {
		return nil, err
	}
	theirs, err := gather(ctx, p.group, mine)
	if err != nil {
		return nil, err
	}
	for _, t := range theirs {
		if t.Verdict == verdictDenied {
			return &peerAccess{verdict: verdictDenied}, nil
		}
	}
	return &peerAccess{verdict: theirs[0].Verdict, why: theirs[0].Why, warnings: theirs[0].Warnings}, nil
}

// accessAcross is a peerAccess as ranks tell it.
type accessAcross struct {
	Verdict  verdict
	Why      string
	Warnings []string
}

// grantedHere is driverGrants for the ranks' devices that this process sees; of the others it knows nothing.
func grantedHere(backend Backend, all []introduction) (verdict, error) {
	seen := ordinals(backend)
	var here []int32
	for _, i := range all {
		if d, ok := seen[i.identity()]; ok {
			here = append(here, d)
		}
	}
	granted, err := driverGrants(backend, here)
	if err == nil && granted == verdictOneDevice { // the only one it sees
		granted = verdictUnproven
	}
	return granted, err
}

func (i *introduction) identity() verdicts.Device {
	return verdicts.Device{UUID: i.UUID, BusID: i.BusID}
}

// ordinals are the devices that this process sees.
func ordinals(backend Backend) map[verdicts.Device]int32 {
	seen := map[verdicts.Device]int32{}
	count, _ := core.DeviceCount(int32(backend))
	for d := range count {
		if info, e := core.GetDeviceInfo(int32(backend), d); e == nil {
			seen[verdicts.Device{UUID: info.UUID, BusID: info.BusID}] = int32(d)
		}
	}
	return seen
}

// searchVerdicts is what the cache says of the ranks' devices, or what a probe finds where this process sees them all.
func searchVerdicts(ctx context.Context, s *settings, backend Backend, all []introduction) peerAccess {
	if s.p2p == P2POff || s.ncclP2PDisable {
		return peerAccess{verdict: verdictUnproven}
	}
	cache, note := openVerdicts(s, backend, nil)
	if cache != nil {
		seen := ordinals(backend)
		for r := range all {
			d, ok := seen[all[r].identity()]
			if !ok {
				cache.blind = true
				d = -1 - int32(r)
			}
			cache.about[d] = all[r].identity()
			cache.devices = append(cache.devices, d)
		}
	}
	return consult(ctx, s, cache, note)
}

// openPeers lets path peer exist: each rank gives the others a handle of its ring, opens theirs, stores a pattern into each,
// and looks at what has arrived in its own. Where one rank cannot, none uses peer access, and all say why.
func (p *party) openPeers(ctx context.Context, handle *core.Comm, s *settings, peers *peerAccess) error {
	if !peers.allowed(s) {
		return nil
	}
	type told struct {
		Handle []byte
		Why    string
	}
	// step tells all what this rank did; false: some rank failed, and none uses peer access.
	step := func(handle []byte, failed *core.Error) (handles [][]byte, good bool, err error) {
		mine := told{Handle: handle}
		if failed != nil {
			mine.Why = failed.Message
		}
		theirs, err := gather(ctx, p.group, mine)
		if err != nil {
			return nil, false, err
		}
		for r, t := range theirs {
			if t.Why != "" {
				peers.refuse(r, t.Why)
				return nil, false, nil
			}
			handles = append(handles, t.Handle)
		}
		return handles, true, nil
	}
	mine, failed := handle.ExportPeer(p.rank.Rank)
	handles, good, err := step(mine, failed)
	for _, next := range []func() *core.Error{
		func() *core.Error { return handle.ImportPeers(handles) },
		func() *core.Error { return handle.CheckPeers(false) },
		func() *core.Error { return handle.CheckPeers(true) },
	} {
		if err != nil || !good {
			return err
		}
		_, good, err = step(nil, next())
	}
	return err
}

// refuse makes all ranks do without peer access, since one cannot have it.
func (p *peerAccess) refuse(rank int, why string) {
	p.verdict, p.why = verdictUnsupported, fmt.Sprintf("rank %d: %s", rank, why)
	p.warnings = append(p.warnings, "peer access between the processes is not used: "+p.why)
}
