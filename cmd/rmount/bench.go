// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"rblk/initiator"
	"rblk/internal/size"
	"rblk/volume"
	"rblk/wire"
)

// benchResult is what `rmount bench --json` prints.
type benchResult struct {
	Source    string             `json:"source"`
	Transport string             `json:"transport"`
	RW        string             `json:"rw"`
	BlockSize int64              `json:"block_size"`
	Depth     int                `json:"depth"`
	Seconds   float64            `json:"seconds"`
	Ops       int                `json:"ops"`
	IOPS      float64            `json:"iops"`
	Bandwidth float64            `json:"bytes_per_second"`
	Latency   map[string]float64 `json:"latency_us"`
}

type benchOptions struct {
	opts    []string
	rw      string
	bs      string
	depth   int
	time    time.Duration
	json    bool
	destroy bool
}

func newBenchCommand() *cobra.Command {
	var b benchOptions
	cmd := &cobra.Command{
		Use:   "bench SOURCE",
		Short: "Measure an export without a cache or a front end in between",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return b.command(cmd.Context(), cmd.OutOrStdout(), args[0])
		},
	}
	sourceFlags(cmd, &b.opts)
	f := cmd.Flags()
	f.StringVar(&b.rw, "rw", "randread", "read, write, randread or randwrite")
	f.StringVar(&b.bs, "bs", "4KiB", "bytes of one operation")
	f.IntVar(&b.depth, "depth", 1, "operations in flight")
	f.DurationVar(&b.time, "time", 5*time.Second, "how long to measure")
	f.BoolVar(&b.json, "json", false, "print JSON")
	f.BoolVar(&b.destroy, "destroy-data", false, "let write and randwrite overwrite the export's content")
	return cmd
}

func (b *benchOptions) command(ctx context.Context, w io.Writer, source string) error {
	src, err := parseSource(source, b.opts)
	if err != nil {
		return err
	}
	bs, err := size.Parse(b.bs)
	if err != nil {
		return usageError("--bs: " + err.Error())
	}
	switch {
	case !slices.Contains([]string{"read", "write", "randread", "randwrite"}, b.rw):
		return usageError(fmt.Sprintf("--rw %s: want read, write, randread or randwrite", b.rw))
	case b.depth < 1 || b.depth > 1024:
		return usageError(fmt.Sprintf("--depth %d: want 1 to 1024", b.depth))
	case b.time <= 0:
		return usageError("--time: want a time such as 5s")
	case b.writes() && !b.destroy:
		return usageError(fmt.Sprintf("--rw %s overwrites the export's content: say --destroy-data if that is meant", b.rw))
	}
	access := wire.AccessRead
	if b.writes() {
		access = wire.AccessWrite
	}
	c, err := dial(ctx, src, access)
	if err != nil {
		return err
	}
	r, err := b.measure(ctx, c.vol, bs)
	if err = errors.Join(err, c.close()); err != nil {
		return err
	}
	r.Source = src.String()
	if b.json {
		return printJSON(w, r)
	}
	r.print(w)
	return nil
}

func (b *benchOptions) writes() bool { return b.rw == "write" || b.rw == "randwrite" }

// worker keeps one operation in flight.
type worker struct {
	latency []time.Duration
	err     error
}

func (b *benchOptions) measure(ctx context.Context, v *initiator.Volume, bs int64) (*benchResult, error) {
	g := v.Geometry()
	blocks := g.Size / max(1, bs)
	if bs < 1 || bs > int64(v.MaxTransfer()) || blocks < 1 {
		return nil, fmt.Errorf("--bs %s: want 1 to %s, and no more than the export has", b.bs, size.Format(int64(v.MaxTransfer())))
	}
	if b.writes() && bs%g.BlockSize != 0 {
		return nil, fmt.Errorf("--bs %s: want a multiple of the export's block, %s", b.bs, size.Format(g.BlockSize))
	}
	a, err := v.NewArena(bs * int64(b.depth))
	if err != nil {
		return nil, err
	}
	defer a.Close()
	ctx, cancel := context.WithTimeout(ctx, b.time)
	defer cancel()
	// Workers touch no memory themselves, so that the volume may be closed under
	// them.
	late := time.AfterFunc(b.time+benchGrace, func() { v.Close() })
	defer late.Stop()
	workers := make([]worker, b.depth)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range workers {
		mem := a.Bytes()[int64(i)*bs : int64(i+1)*bs : int64(i+1)*bs]
		wg.Go(func() { workers[i].run(ctx, v, b, mem, blocks, i) })
	}
	wg.Wait()
	if !late.Stop() {
		return nil, fmt.Errorf("the target went away: operations did not end within %v of the end", benchGrace)
	}
	return b.result(v, workers, time.Since(start), bs)
}

// benchGrace is how long operations may take to end once the time is over. A
// target that has gone away would keep them for ever.
const benchGrace = 10 * time.Second

func (w *worker) run(ctx context.Context, v *initiator.Volume, b *benchOptions, mem []byte, blocks int64, index int) {
	op := &volume.Op{Kind: volume.OpRead, Mem: mem, Done: func(*volume.Op) {}}
	if b.writes() {
		op.Kind, op.Lane = volume.OpWrite, volume.LaneWrite
	}
	random := b.rw == "randread" || b.rw == "randwrite"
	rnd := rand.New(rand.NewPCG(uint64(index), 1))
	next := int64(index)
	w.latency = make([]time.Duration, 0, 1<<16)
	ops := []*volume.Op{op}
	for ctx.Err() == nil {
		block := next % blocks
		next += int64(b.depth)
		if random {
			block = rnd.Int64N(blocks)
		}
		op.Offset = block * int64(len(mem))
		begin := time.Now()
		v.Submit(ops)
		// Not ctx: the memory is the network's until the operation ends.
		if w.err = v.Await(context.Background(), op); w.err != nil {
			return
		}
		w.latency = append(w.latency, time.Since(begin))
	}
}

func (b *benchOptions) result(v *initiator.Volume, workers []worker, took time.Duration, bs int64) (*benchResult, error) {
	var all []time.Duration
	var errs []error
	for i := range workers {
		all = append(all, workers[i].latency...)
		errs = append(errs, workers[i].err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("no operation ended within --time: give it more")
	}
	slices.Sort(all)
	r := &benchResult{
		Transport: v.Transport(), RW: b.rw, BlockSize: bs, Depth: b.depth, Seconds: took.Seconds(), Ops: len(all),
		IOPS: float64(len(all)) / took.Seconds(), Latency: map[string]float64{},
	}
	r.Bandwidth = r.IOPS * float64(bs)
	for name, q := range map[string]float64{"min": 0, "p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1} {
		r.Latency[name] = float64(all[int(q*float64(len(all)-1))].Nanoseconds()) / 1000
	}
	return r, nil
}

func (r *benchResult) print(w io.Writer) {
	fmt.Fprintf(w, "%s of %s, depth %d, over %s: %.0f IOPS, %.1f MB/s\n", r.RW, size.Format(r.BlockSize), r.Depth, r.Transport, r.IOPS, r.Bandwidth/1e6)
	fmt.Fprintf(w, "latency in µs: min %.1f  p50 %.1f  p95 %.1f  p99 %.1f  p99.9 %.1f  max %.1f\n",
		r.Latency["min"], r.Latency["p50"], r.Latency["p95"], r.Latency["p99"], r.Latency["p99.9"], r.Latency["max"])
}
