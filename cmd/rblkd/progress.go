// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"rblk/dataset"
	"rblk/internal/size"
)

// scanBar shows a dataset scan on a terminal, and nothing elsewhere.
type scanBar struct {
	bar *progressbar.ProgressBar // nil: no terminal
}

func newScanBar(f *os.File) *scanBar {
	if !term.IsTerminal(int(f.Fd())) {
		return &scanBar{}
	}
	return &scanBar{progressbar.NewOptions64(-1,
		progressbar.OptionSetWriter(f),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionSpinnerType(14),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetElapsedTime(false),
	)}
}

// show is a dataset.ScanOptions.Progress.
func (b *scanBar) show(p dataset.Progress) {
	if b.bar == nil {
		return
	}
	b.bar.Describe(fmt.Sprintf("scanning: %d directories, %d files, %s", p.Dirs, p.Files, size.Format(p.Bytes)))
	b.bar.Add(0) // an error means that the terminal is gone
}

// done clears the line; later scans run unseen, in the log.
func (b *scanBar) done() {
	if b.bar != nil {
		b.bar.Finish()
	}
}
