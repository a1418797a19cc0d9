package main

import (
	"context"

	"gpu.example/allreduce/device"
)

// peerOf gives what a reduction over peer access cannot beat: as many bytes as every rank must send, S with two ranks and
// 2(N-1)/N S with more, copied by the copy engines to the next rank's memory, all ranks at once.
func (b *bounder) peerOf(ctx context.Context, wire int64) (float64, error) {
	if us, ok := b.peers[wire]; ok {
		return us, nil
	}
	if err := interrupted(ctx); err != nil {
		return 0, err
	}
	n := int64(len(b.devices))
	bytes := wire
	if n > 2 {
		bytes = 2 * (n - 1) * wire / n
	}
	// A row: one copy costs microseconds beside its bytes, which a reduction's kernel does not pay.
	copies := int(max(1, min(int64(boundRow), (256<<20)/max(bytes, 1))))
	repeats := 5
	if b.simulated() {
		repeats, copies = 1, int(max(1, min(int64(copies), (4<<20)/max(bytes, 1))))
	}
	dev, stream, e := b.devices[0], b.up[0], &b.events[0]
	start, stop := b.perfRig.events[0][0], b.perfRig.events[0][1]
	var samples []float64
	for repeat := range repeats + 1 {
		q := &copyQueue{bounder: b, e: e, recorded: map[device.Event]bool{}}
		if !b.simulated() { // holds the stream while the row is enqueued
			q.err = b.driver.Load(dev, 1, gateRounds, stream)
		}
		if q.err == nil {
			q.err = b.driver.Record(dev, start, stream)
		}
		q.record(0, e.fork, stream)
		for rank := range b.devices {
			next := (rank + 1) % len(b.devices)
			q.wait(rank, b.up[rank], e.fork)
			for range copies {
				for left := bytes; left > 0; left -= wire { // the arena holds a message, not two
					q.copy(rank, b.arena.recv[next], b.arena.send[rank], min(left, wire), device.DeviceToDevice, b.up[rank])
				}
			}
			q.record(rank, e.join[rank], b.up[rank])
		}
		for rank := range b.devices {
			q.wait(0, stream, e.join[rank])
		}
		if q.err == nil {
			q.err = b.driver.Record(dev, stop, stream)
		}
		if q.err == nil {
			q.err = b.driver.Synchronize(dev, stream)
		}
		if q.err != nil {
			return 0, q.err
		}
		us, err := b.driver.ElapsedMicros(dev, start, stop)
		if err != nil {
			return 0, err
		}
		if repeat > 0 || repeats == 1 { // the first warms up
			samples = append(samples, us/float64(copies))
		}
	}
	b.peers[wire] = median(samples)
	return b.peers[wire], nil
}
