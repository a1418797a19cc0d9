package main

import (
	"math"

	"gpu.example/allreduce/device"
)

// The time that large reductions through the host are held against (docs/performance.md, "T(c*)"): what the bare bytes take
// with all ranks' links busy both ways, and for c chunks a k/c part of it for the first and last to pass, and the fixed cost
// of each.
//
//	T(c) = S/B (1 + k/c) + c o,  least at c* = sqrt(k S / (B o))
const (
	copyMicros = 3.0 // o: of a copy, beside its bytes

	modelBytes = 64 << 20 // of each upload where the rate is measured
	modelChunk = 4 << 20
	modelFrom  = 1 << 20
)

// bestTime is T(c*) of a reduction whose bytes alone take so many microseconds.
func bestTime(bytesMicros float64, ranks int) float64 {
	k := 3.0 // two-shot: up, down and add, up, down
	if ranks == 2 {
		k = 1
	}
	return bytesMicros + 2*math.Sqrt(k*bytesMicros*copyMicros)
}

// byteTime gives the microseconds of one wire byte per rank: every rank uploads its bytes and downloads 2(N-1)/N as many,
// all at once, nothing waiting for anything. Measured once.
func (b *bounder) byteTime() (float64, error) {
	if b.perByte > 0 {
		return b.perByte, nil
	}
	n, bytes, repeats := int64(len(b.devices)), int64(modelBytes), 5
	if b.simulated() {
		bytes, repeats = modelBytes/4, 1
	}
	down, chunk := 2*(n-1)*bytes/n, min(modelChunk, b.arena.bytes)
	var samples []float64
	for repeat := range repeats + 1 {
		dev, stream := b.devices[0], b.up[0]
		start, stop := b.perfRig.events[0][0], b.perfRig.events[0][1]
		if !b.simulated() { // holds the stream while the copies are enqueued
			if err := b.driver.Load(dev, 1, gateRounds, stream); err != nil {
				return 0, err
			}
		}
		err := b.driver.Record(dev, start, stream)
		if err == nil {
			err = b.flood(bytes, down, chunk)
		}
		if err == nil {
			err = b.driver.Record(dev, stop, stream)
		}
		if err == nil {
			err = b.driver.Synchronize(dev, stream)
		}
		if err != nil {
			return 0, err
		}
		us, err := b.driver.ElapsedMicros(dev, start, stop)
		if err != nil {
			return 0, err
		}
		if repeat > 0 || repeats == 1 { // the first warms up
			samples = append(samples, us)
		}
	}
	copies := float64((max(bytes, down) + chunk - 1) / chunk)
	b.perByte = (median(samples) - copies*copyMicros) / float64(bytes)
	return b.perByte, nil
}

// flood enqueues both directions of all ranks, from and back to rank 0's upload stream. Uploads and downloads of a rank have
// a half of its ring each.
func (b *bounder) flood(up, down, chunk int64) error {
	e := &b.events[0]
	q := &copyQueue{bounder: b, e: e, recorded: map[device.Event]bool{}}
	q.record(0, e.fork, b.up[0])
	for rank := range b.devices {
		q.wait(rank, b.up[rank], e.fork)
		q.wait(rank, b.down[rank], e.fork)
	}
	const half = largeRing / 2
	for at := int64(0); at < max(up, down); at += chunk {
		place := device.Ptr(at / chunk % (half / chunk) * chunk)
		for rank := range b.devices { // the arenas may be smaller than the bytes: their first chunk serves for all
			q.copy(rank, b.ring[rank]+place, b.arena.send[rank], min(chunk, up-at), device.DeviceToHost, b.up[rank])
			q.copy(rank, b.arena.recv[rank], b.ring[rank]+half+place, min(chunk, down-at), device.HostToDevice, b.down[rank])
		}
	}
	for rank := range b.devices {
		q.record(rank, e.seen[0][rank][0], b.up[rank])
		q.record(rank, e.join[rank], b.down[rank])
		q.wait(0, b.up[0], e.seen[0][rank][0])
		q.wait(0, b.up[0], e.join[rank])
	}
	return q.err
}

// model fills in a row's T(c*), where chunks mean something.
func (b *bounder) model(row *perfRow, wireBytes int64) error {
	if wireBytes < modelFrom {
		return nil
	}
	perByte, err := b.byteTime()
	if err != nil {
		return err
	}
	us := bestTime(perByte*float64(wireBytes), len(b.devices))
	row.ModelUs = round3(us)
	if row.Ours.Median > 0 {
		row.PercentOfModel = round3(100 * us / row.Ours.Median)
	}
	return nil
}
